#include "record_io.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

#include "checksum.hpp"
#include "errors.hpp"

namespace tiercache {
namespace {

using Clock = std::chrono::steady_clock;

bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kBlock == 0; }

// Header and last block of a record: the parts that are never the caller's memory.
struct Frame {
  Frame() : memory(2 * kBlock) {}
  RecordHeader& header() { return *reinterpret_cast<RecordHeader*>(memory.data()); }
  std::uint8_t* tail() { return memory.data() + kBlock; }
  AlignedMemory memory;
};

// The payload cut into pieces of kPiece; a piece's last, partial block is the frame's tail.
struct Plan {
  Plan(std::uint64_t record_offset, std::uint64_t stored) : offset(record_offset), size(stored) {}
  std::size_t pieces() const { return static_cast<std::size_t>((size - 1) / kPiece + 1); }
  std::uint64_t begin(std::size_t piece) const { return piece * kPiece; }
  std::uint64_t bytes(std::size_t piece) const { return std::min(kPiece, size - begin(piece)); }

  // `at`: where this piece's payload lies in memory.
  IoRequest request(IoKind kind, const Segment& segment, std::size_t piece, std::uint8_t* at,
                    Frame& frame) const {
    IoRequest made;
    made.kind = kind;
    made.fd = segment.fd.get();
    made.segment = segment.id;
    made.offset = offset + begin(piece) + (piece == 0 ? 0 : kBlock);
    if (piece == 0) made.parts[made.num_parts++] = {&frame.header(), kBlock};
    const std::uint64_t whole = bytes(piece) / kBlock * kBlock;
    if (whole > 0) made.parts[made.num_parts++] = {at, whole};
    if (whole < bytes(piece)) made.parts[made.num_parts++] = {frame.tail(), kBlock};
    return made;
  }

  std::uint64_t offset, size;
};

std::string where(const Segment& segment, std::uint64_t offset) {
  return segment.path + " at " + std::to_string(offset);
}

// One job with at most a few bounce buffers in flight. Drains before it goes.
class Transfer {
 public:
  Transfer(const RecordPath& path, std::size_t pieces)
      : path_(path), job_(std::make_shared<Job>(pieces)), pieces_(pieces) {}
  ~Transfer() {
    settle();
    for (auto& [piece, buffer] : buffers_) path_.bounce.release(std::move(buffer));
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void offer(std::size_t piece, const IoRequest& request) {
    offered_.push_back(piece);
    if (pieces_ == 1 && path_.drive.carry(job_, piece, request)) return;
    path_.drive.offer(job_, piece, request);
  }

  // A buffer for this piece. Waits for others' only while it holds none itself, so that holders never wait in
  // a ring.
  std::uint8_t* buffer(std::size_t piece) {
    AlignedMemory found = path_.bounce.acquire(buffers_.empty() ? path_.deadline : Clock::time_point{});
    if (!found && !buffers_.empty()) {
      auto [oldest, reused] = std::move(buffers_.front());
      buffers_.pop_front();
      const int code = wait(oldest);
      if (code != 0) {
        path_.bounce.release(std::move(reused));
        fail(code);
      }
      found = std::move(reused);
    }
    if (!found) fail(ETIMEDOUT);
    buffers_.emplace_back(piece, std::move(found));
    return buffers_.back().second.data();
  }

  void release_buffer() {
    path_.bounce.release(std::move(buffers_.front().second));
    buffers_.pop_front();
  }

  int wait(std::size_t piece) {
    const int code = job_->wait(piece, path_.deadline);
    if (code == ETIMEDOUT) settle();
    return code;
  }

  [[noreturn]] void fail(int code) {
    settle();
    if (code == ETIMEDOUT) {
      throw Error(ErrorKind::kTimeout, "disk tier: I/O on " + path_.segment.path, "no completion",
                  "its deadline", "the drive is slower than timeout_s allows, or hangs");
    }
    if (code == ECANCELED)
      throw Error(ErrorKind::kClosed, "disk tier: closed during I/O on " + path_.segment.path);
    throw io_error("disk tier: I/O on " + path_.segment.path, code);
  }

 private:
  // What is queued is taken back; what is in flight is waited for, however long the drive takes.
  void settle() {
    if (offered_.empty() || settled_) return;
    settled_ = true;
    path_.drive.cancel(job_, ECANCELED);
    for (const std::size_t piece : offered_) job_->wait(piece, Clock::time_point::max());
  }

  const RecordPath& path_;
  std::shared_ptr<Job> job_;
  std::size_t pieces_;
  std::deque<std::pair<std::size_t, AlignedMemory>> buffers_;
  std::vector<std::size_t> offered_;
  bool settled_ = false;
};

}  // namespace

void write_record(const RecordPath& path, std::uint64_t offset, const std::uint8_t* data,
                  const RecordInfo& info) {
  const Plan plan(offset, info.stored_bytes);
  Frame frame;
  RecordHeader& header = *new (&frame.header()) RecordHeader;
  header.place = {path.segment.epoch, offset, path.segment.id, 0};
  header.info = info;
  header.chunk_log2 = chunk_log2_for(plan.size);
  header.num_chunks = static_cast<std::uint32_t>(((plan.size - 1) >> header.chunk_log2) + 1);
  const bool bounced = path.direct && !aligned(data);
  const std::size_t rest = plan.size % kBlock;
  std::memcpy(frame.tail(), data + plan.size - rest, rest);

  Transfer transfer(path, plan.pieces());
  const auto send = [&](std::size_t piece) {
    // The engine only reads what it writes.
    auto* at = const_cast<std::uint8_t*>(data + plan.begin(piece));
    if (bounced) {
      at = transfer.buffer(piece);
      std::memcpy(at, data + plan.begin(piece), plan.bytes(piece));
    }
    transfer.offer(piece, plan.request(IoKind::kWrite, path.segment, piece, at, frame));
  };
  // The header holds every checksum, so its piece goes last.
  for (std::size_t piece = 0; piece < plan.pieces(); ++piece) {
    std::uint32_t& crc = header.chunk_crc[plan.begin(piece) >> header.chunk_log2];
    crc = crc32c(crc, data + plan.begin(piece), plan.bytes(piece));
    if (piece > 0) send(piece);
  }
  seal(header, path.uuid);
  send(0);
  for (std::size_t piece = 0; piece < plan.pieces(); ++piece) {
    if (const int code = transfer.wait(piece); code != 0) transfer.fail(code);
  }
}

void read_record(const RecordPath& path, std::uint64_t offset, std::uint8_t* out,
                 const RecordInfo& expected) {
  const Plan plan(offset, expected.stored_bytes);
  Frame frame;
  const RecordHeader& header = frame.header();
  const bool bounced = path.direct && !aligned(out);
  const std::size_t rest = plan.size % kBlock;
  const RecordPlace place{path.segment.epoch, offset, path.segment.id, 0};
  const auto corrupt = [&](const std::string& reason) {
    throw Error(ErrorKind::kCorrupt, "disk tier: record in " + where(path.segment, offset), reason, {},
                "the page is a miss: compute it again");
  };

  Transfer transfer(path, plan.pieces());
  std::deque<std::uint8_t*> memory;
  std::size_t offered = 0;
  const auto offer_more = [&](std::size_t until) {
    for (; offered < std::min(until, plan.pieces()); ++offered) {
      memory.push_back(bounced ? transfer.buffer(offered) : out + plan.begin(offered));
      transfer.offer(offered, plan.request(IoKind::kRead, path.segment, offered, memory.back(), frame));
    }
  };
  if (!bounced) offer_more(plan.pieces());
  std::uint32_t crc = 0;
  for (std::size_t piece = 0; piece < plan.pieces(); ++piece) {
    // Bounced reads keep one buffer: the next piece is asked for once this one is copied out.
    offer_more(piece + 1);
    const int code = transfer.wait(piece);
    if (code == ENODATA) corrupt("end of file inside the record");
    if (code != 0) transfer.fail(code);
    if (piece == 0) {
      std::string reason = refuse_record(header, path.uuid, place, path.segment.size - offset);
      if (reason.empty()) reason = differs(header.info, expected);
      if (!reason.empty()) corrupt(reason);
    }
    const std::uint64_t begin = plan.begin(piece), bytes = plan.bytes(piece);
    if (bounced) std::memcpy(out + begin, memory.front(), bytes / kBlock * kBlock);
    if (bounced) transfer.release_buffer();
    memory.pop_front();
    if (piece + 1 == plan.pieces()) std::memcpy(out + plan.size - rest, frame.tail(), rest);
    crc = crc32c(crc, out + begin, bytes);
    const std::uint64_t end = begin + bytes;
    if (end == plan.size || (end & ((1ull << header.chunk_log2) - 1)) == 0) {
      if (crc != header.chunk_crc[begin >> header.chunk_log2]) corrupt("payload checksum");
      crc = 0;
    }
  }
}

void sync_segment(Drive& drive, const Segment& segment, Clock::time_point deadline) {
  const auto job = std::make_shared<Job>(1);
  IoRequest request;
  request.kind = IoKind::kSync;
  request.fd = segment.fd.get();
  request.segment = segment.id;
  drive.offer(job, 0, request);
  const int code = job->wait_all(deadline);
  if (code == ETIMEDOUT) throw Error(ErrorKind::kTimeout, "disk tier: sync of " + segment.path);
  if (code != 0) throw io_error("disk tier: sync of " + segment.path, code);
}

}  // namespace tiercache
