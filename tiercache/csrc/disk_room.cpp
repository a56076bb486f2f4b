// The part of Disk that deals room out: slots, and the records that give way to them.
#include "disk.hpp"
#include "disk_use.hpp"
#include "errors.hpp"
#include "waits.hpp"

namespace tiercache {

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
    const bool committed = wait_until(changed_, lock, deadline, moved);
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

// Room from records of earlier processes, or let go by this one, that nobody asks for; oldest first.
bool Disk::evict_unclaimed(std::uint64_t length) {
  const std::lock_guard lock(mutex_);
  std::uint64_t freed = 0;
  for (auto at = unclaimed_.begin(); at != unclaimed_.end() && freed < length;) {
    const std::uint64_t slot = (at++)->second;
    const Entry& entry = slots_.at(slot);
    if (entry.users > 0) continue;  // a reader is at it
    freed += entry.extent.length;
    ++counts_.evicted_unclaimed;
    end_entry(slot);
  }
  return freed > 0;
}

void Disk::shelve(std::uint64_t slot, std::uint64_t order) {
  Entry& entry = slots_.at(slot);
  entry.order = order;
  unclaimed_.emplace(order, slot);
  spare_ += entry.extent.length;
}

void Disk::unshelve(std::uint64_t slot) {
  const Entry& entry = slots_.at(slot);
  if (unclaimed_.erase({entry.order, slot}) > 0) spare_ -= entry.extent.length;
}

}  // namespace tiercache
