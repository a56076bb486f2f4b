// Disk from its making to its end, and its books.
#include "disk.hpp"

#include <unistd.h>

#include <cstring>

#include "disk_use.hpp"
#include "errors.hpp"

namespace tiercache {

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

void Disk::check_process() const {
  if (getpid() == owner_) return;
  throw Error(ErrorKind::kForked, "disk tier: used in a forked child of pid " + std::to_string(owner_), {},
              {}, "open the store in the child, or use the spawn start method");
}

void Disk::check_open() const {
  if (closed_) throw Error(ErrorKind::kClosed, "disk tier: used after close()");
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

std::uint64_t Disk::used_bytes() const {
  check_process();
  const std::lock_guard lock(mutex_);
  return used_;
}

std::uint64_t Disk::spare_bytes() const {
  check_process();
  const std::lock_guard lock(mutex_);
  return spare_;
}

DiskStats Disk::stats() const {
  check_process();
  const std::lock_guard lock(mutex_);
  DiskStats stats = counts_;
  stats.used_bytes = used_;
  stats.spare_bytes = spare_;
  stats.slots = slots_.size();
  stats.records = by_digest_.size();
  stats.pending_bytes = pending_bytes_;
  stats.journal = journaled_ - confirmed_;
  stats.misses.assign(misses_.begin(), misses_.end());
  stats.segments = segments_.stats();
  stats.rungs = rungs_;
  for (const auto& drive : drives_) stats.drives.push_back(drive->stats());
  return stats;
}

void Disk::check_integrity() const {
  check_process();
  const std::lock_guard lock(mutex_);
  std::uint64_t used = 0, spare = 0;
  for (const auto& [slot, entry] : slots_) {
    used += entry.extent.length;
    if (unclaimed_.contains({entry.order, slot})) spare += entry.extent.length;
  }
  if (spare != spare_)
    throw Error(ErrorKind::kState, "disk tier: unclaimed records and spare bytes differ",
                std::to_string(spare), std::to_string(spare_));
  if (used != used_)
    throw Error(ErrorKind::kState, "disk tier: slots and used bytes differ", std::to_string(used),
                std::to_string(used_));
  for (const auto& [digest, slot] : by_digest_) {
    const auto found = slots_.find(slot);
    if (found == slots_.end() || found->second.info.digest != digest) {
      throw Error(ErrorKind::kState, "disk tier: a key without its record", hex(digest));
    }
  }
  // Only when nothing moves can the files be counted against the slots.
  if (operations_ == 0 && pending_bytes_ == 0 && !segments_.consistent(used_)) {
    throw Error(ErrorKind::kState, "disk tier: extents, records and files do not add up");
  }
}

}  // namespace tiercache
