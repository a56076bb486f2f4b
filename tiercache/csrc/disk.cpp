#include "disk.hpp"

#include <algorithm>
#include <cstring>

#include "disk_use.hpp"
#include "errors.hpp"

namespace tiercache {
namespace {

using Clock = std::chrono::steady_clock;

// How long a record whose segment failed waits for another place.
constexpr double kPlaceWaitS = 1;

Clock::time_point deadline_in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

std::size_t Disk::DigestHash::operator()(const Digest& digest) const noexcept {
  std::size_t word = 0;
  std::memcpy(&word, digest.data(), sizeof word);
  return word;
}

Disk::Disk(DiskOptions options)
    : options_(std::move(options)),
      owner_(getpid()),
      segments_(options_.segments),
      read_bounce_(kPiece, options_.bounce_buffers),
      write_bounce_(kPiece, options_.bounce_buffers),
      sequence_(options_.next_sequence) {
  for (std::uint32_t drive = 0; drive < segments_.num_drives(); ++drive) open_drive(drive);
}

Disk::~Disk() { close(options_.timeout_s); }

double Disk::load(std::uint32_t drive) const {
  const DriveStats stats = drives_[drive]->stats();
  const double bandwidth = stats.write_bytes_per_s > 0 ? stats.write_bytes_per_s : 1e9;
  return static_cast<double>(stats.in_flight_bytes + stats.queued * kPiece) / bandwidth;
}

std::optional<Extent> Disk::place(std::uint64_t length, double wait_s) {
  const auto deadline = deadline_in(wait_s);
  while (true) {
    if (auto found = segments_.allocate(length, [this](std::uint32_t drive) { return load(drive); }))
      return found;
    if (wait_s <= 0) return std::nullopt;
    std::unique_lock lock(mutex_);
    if (pending_bytes_ == 0) {
      lock.unlock();
      if (!evict_unclaimed(length)) return std::nullopt;
      continue;
    }
    // Deleted records whose deletion isn't committed yet: ask for it and wait.
    const std::uint64_t before = confirmed_;
    hurry_ = true;
    changed_.notify_all();
    const auto moved = [&] { return confirmed_ != before || closed_ || pending_bytes_ == 0; };
    const bool committed = changed_.wait_until(lock, deadline, moved);
    hurry_ = false;
    if (!committed || closed_) return std::nullopt;
  }
}

bool Disk::make_room(std::uint64_t num_bytes, double wait_s) {
  const Use use(*this);
  const std::uint64_t length = record_length(num_bytes);
  if (num_bytes == 0 || num_bytes >= (1ull << 62) || length > segments_.largest_record()) return false;
  const auto extent = place(length, wait_s);
  if (extent) segments_.release(*extent);
  return extent.has_value();
}

std::uint64_t Disk::reserve(std::uint64_t num_bytes) {
  const Use use(*this);
  const std::uint64_t length = record_length(num_bytes);
  std::optional<Extent> extent;
  if (num_bytes > 0 && num_bytes < (1ull << 62) && length <= segments_.largest_record())
    extent = place(length, 0);
  if (!extent) {
    const SegmentsStats room = segments_.stats();
    std::string have =
        std::to_string(room.free_bytes) + " bytes free in " + std::to_string(room.segments) + " files";
    if (room.growth_refused > 0) have += "; the file system has no room for more";
    if (room.drives_off > 0) have += "; " + std::to_string(room.drives_off) + " drives are off after errors";
    throw Error(ErrorKind::kFull, "disk tier: reserve of " + std::to_string(num_bytes) + " bytes", have,
                std::to_string(capacity_bytes()), "discard pages, or raise disk_capacity or free disk space");
  }
  const std::lock_guard lock(mutex_);
  Entry entry;
  entry.extent = std::move(*extent);
  entry.num_bytes = num_bytes;
  used_ += length;
  slots_.emplace(next_slot_, std::move(entry));
  return next_slot_++;
}

RecordPath Disk::path_of(const Extent& extent, bool reading) {
  const std::uint32_t drive = extent.segment->drive;
  return {*drives_[drive],
          *extent.segment,
          options_.segments.uuid,
          segments_.direct(drive),
          reading ? read_bounce_ : write_bounce_,
          deadline_in(options_.timeout_s)};
}

IndexValue Disk::value_of(const Entry& entry) const {
  IndexValue value;
  value.info = entry.info;
  value.place = {entry.extent.segment->epoch, entry.extent.offset, entry.extent.segment->id, 0};
  value.hits = entry.hits;
  seal(value);
  return value;
}

void Disk::write(std::uint64_t slot, const std::uint8_t* data, std::uint64_t size, RecordInfo info) {
  const Use use(*this);
  info.stored_bytes = size;
  info.sequence = sequence_++;
  info.created_ns = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                   std::chrono::system_clock::now().time_since_epoch())
                                                   .count());
  std::unique_lock lock(mutex_);
  auto found = slots_.find(slot);
  if (found == slots_.end() || found->second.state != State::kReserved || size == 0 ||
      size > found->second.num_bytes) {
    throw Error(
        ErrorKind::kState, "disk tier: write of slot " + std::to_string(slot),
        std::to_string(size) + " bytes",
        found == slots_.end() ? "a reserved slot" : std::to_string(found->second.num_bytes) + " bytes, once");
  }
  Entry& entry =
      found->second;  // stays put: the caller doesn't free it meanwhile, and rehashing moves no node
  entry.state = State::kWriting;
  entry.info = info;
  entry.source = data;
  const auto unpublish = [&](State state) {
    calmed_.wait(lock, [&] { return entry.users == 0; });
    entry.source = nullptr;
    entry.state = state;
  };
  for (int tries = 0;; ++tries) {
    const Extent extent = entry.extent;
    lock.unlock();
    try {
      write_record(path_of(extent, false), extent.offset, data, info);
      extent.segment->dirty = true;  // after the write: a sync that ran meanwhile may have missed it
      lock.lock();
      break;
    } catch (const Error& error) {
      // A segment that failed takes no more records; the record tries its luck elsewhere.
      const bool drive_error = error.kind == ErrorKind::kIo;
      if (drive_error) segments_.quarantine(extent.segment);
      std::optional<Extent> other;
      if (drive_error && tries < 3) other = place(extent.length, kPlaceWaitS);
      lock.lock();
      if (!other) {
        unpublish(State::kReserved);
        throw;
      }
      ++counts_.moved_writes;
      segments_.release(extent);
      entry.extent = std::move(*other);
    }
  }
  unpublish(State::kWritten);
  if (info.flags & kPersistent) publish_record(slot);
}

// Later look-ups find this record. An older one of the key that nobody claims has no use any more.
void Disk::publish_record(std::uint64_t slot) {
  Entry& entry = slots_.at(slot);
  const auto [known, fresh] = by_digest_.try_emplace(entry.info.digest, slot);
  const std::uint64_t before = std::exchange(known->second, slot);
  if (options_.durability != Durability::kScratch) {
    entry.indexed = true;
    journal({entry.info.digest, entry.info.sequence, value_of(entry)}, {});
  }
  if (fresh) return;
  const Entry& old = slots_.at(before);
  if (old.claims == 0 && old.users == 0) end_entry(before);
}

void Disk::read(std::uint64_t slot, std::uint8_t* out, std::uint64_t size, const RecordInfo& expected) {
  const Use use(*this);
  std::unique_lock lock(mutex_);
  const auto found = slots_.find(slot);
  if (found == slots_.end() || found->second.state == State::kReserved || found->second.doomed) {
    throw Error(ErrorKind::kState, "disk tier: read of slot " + std::to_string(slot),
                "a slot that was never written");
  }
  Entry& entry = found->second;
  RecordInfo wanted = expected;
  wanted.stored_bytes = size;
  std::string reason = entry.bad ? "quarantined" : differs(entry.info, wanted);
  if (!reason.empty()) {
    ++misses_[reason];
    throw Error(ErrorKind::kCorrupt, "disk tier: read of slot " + std::to_string(slot), reason);
  }
  ++entry.users;
  const Extent extent = entry.extent;
  const RecordInfo info = entry.info;
  const std::uint8_t* const source = entry.source;
  if (source) ++counts_.served_from_memory;
  lock.unlock();
  const auto leave = [&] {
    if (!lock.owns_lock()) lock.lock();
    const bool writing = entry.state == State::kWriting;
    if (--entry.users == 0 && entry.doomed) end_entry(slot);
    if (writing) calmed_.notify_all();
  };
  try {
    if (source) {
      std::memcpy(out, source, size);
    } else {
      read_record(path_of(extent, true), extent.offset, out, info);
    }
  } catch (const Error& error) {
    if (error.kind == ErrorKind::kCorrupt) distrust(slot, error.got);
    if (error.kind == ErrorKind::kIo) segments_.quarantine(extent.segment);
    leave();
    throw;
  }
  lock.lock();
  ++entry.hits;
  ++counts_.hits;
  leave();
}

void Disk::free(std::uint64_t slot) {
  const Use use(*this);
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(slot);
  if (found == slots_.end() || found->second.doomed || found->second.state == State::kWriting) {
    throw Error(ErrorKind::kState, "disk tier: free of slot " + std::to_string(slot),
                "a slot that is not reserved, or is being written");
  }
  found->second.doomed = true;
  if (found->second.users == 0) end_entry(slot);
}

void Disk::let_go(std::uint64_t slot) {
  const Use use(*this);
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(slot);
  if (found == slots_.end() || found->second.state != State::kWritten || found->second.claims == 0) {
    throw Error(ErrorKind::kState, "disk tier: let go of slot " + std::to_string(slot),
                "a slot that is not written, or not claimed");
  }
  Entry& entry = found->second;
  if (--entry.claims > 0) return;
  shelve(slot, sequence_++);
  const auto known = by_digest_.find(entry.info.digest);
  const bool findable = known != by_digest_.end() && known->second == slot;
  if (findable && options_.durability != Durability::kScratch) return;
  entry.doomed = true;
  if (entry.users == 0) end_entry(slot);
}

void Disk::end_entry(std::uint64_t slot) {
  unshelve(slot);
  const auto found = slots_.find(slot);
  Entry entry = std::move(found->second);
  slots_.erase(found);
  used_ -= entry.extent.length;
  if (const auto known = by_digest_.find(entry.info.digest);
      known != by_digest_.end() && known->second == slot) {
    by_digest_.erase(known);
  }
  if (entry.bad) {
    segments_.withhold(entry.extent);
  } else if (entry.indexed) {
    journal({entry.info.digest, entry.info.sequence, std::nullopt}, entry.extent);
  } else {
    segments_.release(entry.extent);
  }
}

bool Disk::close(double timeout_s) {
  if (getpid() != owner_) return true;
  const auto deadline = deadline_in(timeout_s);
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    calmed_.notify_all();
  }
  bool calm = true;
  for (const auto& drive : drives_) calm = drive->drain(deadline) && calm;
  std::unique_lock lock(mutex_);
  calm = calmed_.wait_until(lock, deadline, [this] { return operations_ == 0; }) && calm;
  if (!calm) {
    // Threads that hang in the kernel keep their state; everything else of them ends here.
    for (auto& drive : drives_) {
      drive->abandon();
      [[maybe_unused]] Drive* const left = drive.release();
    }
  }
  drives_.clear();
  return calm;
}

}  // namespace tiercache
