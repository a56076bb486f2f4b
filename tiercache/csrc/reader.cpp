#include "reader.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "checksum.hpp"
#include "errors.hpp"

namespace tiercache {

Reader::Reader(std::vector<std::string> directories, const Uuid& uuid)
    : directories_(std::move(directories)), uuid_(uuid), owner_(getpid()) {}

void Reader::check_process() const {
  if (getpid() == owner_) return;
  throw Error(ErrorKind::kForked, "disk tier: reader used in a forked child of pid " + std::to_string(owner_),
              {}, {}, "open a reader in the child");
}

SegmentPtr Reader::segment(const RecordPlace& place) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = segments_.find(place.segment); found != segments_.end()) return found->second;
  }
  char name[24];
  std::snprintf(name, sizeof name, "%04u.seg", place.segment);
  std::string reason = "no such segment";
  for (std::uint32_t drive = 0; drive < directories_.size(); ++drive) {
    const std::string shown = directories_[drive] + "/" + name;
    try {
      const Fd home = open_directory(directories_[drive], false);
      Fd fd = open_file(home.get(), name, O_RDONLY, shown);
      const AlignedMemory block(kBlock);
      const auto& header = *reinterpret_cast<const SegmentHeader*>(block.data());
      const std::uint64_t size = file_size(fd.get(), shown);
      if (read_full(fd.get(), block.data(), kBlock, 0) != 0) continue;
      reason = refuse_segment(header, uuid_, place.segment, size);
      if (!reason.empty()) continue;
      auto made = std::make_shared<Segment>();
      made->id = place.segment;
      made->drive = drive;
      made->epoch = header.epoch;
      made->size = size;
      made->path = shown;
      made->fd = std::move(fd);
      const std::lock_guard lock(mutex_);
      return segments_.emplace(place.segment, std::move(made)).first->second;
    } catch (const Error& error) {
      if (error.code != ENOENT) throw;
    }
  }
  throw Error(ErrorKind::kMissing, "disk tier: segment " + std::to_string(place.segment), reason);
}

void Reader::lease(const IndexValue& value) {
  check_process();
  const SegmentPtr found = segment(value.place);
  // Before anybody allocates memory for what the entry says.
  const std::string reason = refuse_value(value);
  const std::uint64_t length = reason.empty() ? record_length(value.info.stored_bytes) : 0;
  if (length == 0 || value.place.offset > found->size || length > found->size - value.place.offset) {
    throw Error(ErrorKind::kCorrupt, "disk tier: index entry of a record in " + found->path,
                reason.empty() ? "a place outside its segment" : reason, {}, "rebuild the index");
  }
  const std::lock_guard lock(mutex_);
  unsigned& count = leases_[{value.place.segment, value.place.offset}];
  if (count == 0 && !lock_range_shared(found->fd.get(), value.place.offset, length)) {
    const int code = errno;
    leases_.erase({value.place.segment, value.place.offset});
    throw io_error("disk tier: lease in " + found->path, code);
  }
  ++count;
}

void Reader::release(const IndexValue& value) {
  check_process();
  const std::lock_guard lock(mutex_);
  const auto held = leases_.find({value.place.segment, value.place.offset});
  if (held == leases_.end()) throw Error(ErrorKind::kState, "disk tier: release of a lease that is not held");
  if (--held->second > 0) return;
  leases_.erase(held);
  unlock_range(segments_.at(value.place.segment)->fd.get(), value.place.offset,
               record_length(value.info.stored_bytes));
}

std::uint64_t Reader::leases() const {
  check_process();
  const std::lock_guard lock(mutex_);
  return leases_.size();
}

void Reader::read(const IndexValue& value, std::uint8_t* out) {
  check_process();
  const SegmentPtr found = segment(value.place);
  const auto corrupt = [&](const std::string& reason) {
    throw Error(ErrorKind::kCorrupt,
                "disk tier: record in " + found->path + " at " + std::to_string(value.place.offset), reason,
                {}, "the page is a miss: compute it again");
  };
  const auto load = [&](void* data, std::size_t size, std::uint64_t offset) {
    const int code = read_full(found->fd.get(), data, size, offset);
    if (code == ENODATA) corrupt("end of file inside the record");
    if (code != 0) throw io_error("disk tier: read of " + found->path, code);
  };
  RecordPlace place = value.place;
  place.epoch = found->epoch;
  if (place.offset % kBlock != 0 || place.offset < kBlock || place.offset + kBlock > found->size)
    corrupt("no place");
  RecordHeader header;
  load(&header, sizeof header, place.offset);
  std::string reason = refuse_record(header, uuid_, place, found->size - place.offset);
  if (reason.empty()) reason = differs(header.info, value.info);
  if (!reason.empty()) corrupt(reason);
  const std::uint64_t size = header.info.stored_bytes, chunk = 1ull << header.chunk_log2;
  for (std::uint64_t begin = 0; begin < size; begin += chunk) {
    const std::uint64_t bytes = std::min(chunk, size - begin);
    load(out + begin, bytes, place.offset + kBlock + begin);
    if (crc32c(0, out + begin, bytes) != header.chunk_crc[begin >> header.chunk_log2])
      corrupt("payload checksum");
  }
}

}  // namespace tiercache
