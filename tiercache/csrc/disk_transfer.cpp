// The part of Disk that carries bytes: a slot's record is written once and read.
#include <cstring>
#include <utility>

#include "disk.hpp"
#include "disk_use.hpp"
#include "errors.hpp"

namespace tiercache {
namespace {

// How long a record whose segment failed waits for another place.
constexpr double kPlaceWaitS = 1;

}  // namespace

RecordPath Disk::path_of(const Extent& extent, bool reading) {
  const std::uint32_t drive = extent.segment->drive;
  return {*drives_[drive],
          *extent.segment,
          options_.segments.uuid,
          segments_.direct(drive),
          reading ? read_bounce_ : write_bounce_,
          deadline_in(options_.timeout_s)};
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

void Disk::distrust(std::uint64_t slot, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++misses_[reason];
  Entry& entry = slots_.at(slot);
  entry.bad = true;
  const auto known = by_digest_.find(entry.info.digest);
  if (known != by_digest_.end() && known->second == slot) by_digest_.erase(known);
  if (std::exchange(entry.indexed, false))
    journal({entry.info.digest, entry.info.sequence, std::nullopt}, {});
}

}  // namespace tiercache
