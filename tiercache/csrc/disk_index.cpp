// The part of Disk behind the index: look-ups, the journal of changes, recovery.
#include <algorithm>
#include <cstring>
#include <set>

#include "disk.hpp"
#include "disk_use.hpp"
#include "errors.hpp"

namespace tiercache {
namespace {

using Clock = std::chrono::steady_clock;

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

}  // namespace

void Disk::check_process() const {
  if (getpid() == owner_) return;
  throw Error(ErrorKind::kForked, "disk tier: used in a forked child of pid " + std::to_string(owner_), {},
              {}, "open the store in the child, or use the spawn start method");
}

std::vector<Disk::Found> Disk::lookup(const std::vector<Digest>& digests) {
  const Use use(*this);
  const std::lock_guard lock(mutex_);
  std::vector<Found> all(digests.size());
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const auto found = by_digest_.find(digests[i]);
    if (found == by_digest_.end()) continue;
    Entry& entry = slots_.at(found->second);
    unshelve(found->second);
    ++entry.claims;
    all[i].emplace(found->second, entry.info);
  }
  return all;
}

bool Disk::remove(const Digest& digest) {
  const Use use(*this);
  const std::lock_guard lock(mutex_);
  const auto found = by_digest_.find(digest);
  if (found == by_digest_.end()) return false;
  const std::uint64_t slot = found->second;
  Entry& entry = slots_.at(slot);
  by_digest_.erase(found);
  entry.doomed = true;
  if (entry.users == 0) end_entry(slot);
  return true;
}

std::vector<std::pair<std::uint64_t, IndexValue>> Disk::records() const {
  check_process();
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::uint64_t, IndexValue>> all;
  for (const auto& [digest, slot] : by_digest_) all.emplace_back(slot, value_of(slots_.at(slot)));
  return all;
}

std::string Disk::adopt(const IndexValue& value) {
  const Use use(*this);
  std::string reason = refuse_value(value);
  if (reason.empty() && !(value.info.flags & kPersistent)) reason = "not a persistent record";
  std::optional<Extent> extent;
  if (reason.empty()) {
    extent = segments_.claim(value.place, record_length(value.info.stored_bytes));
    if (!extent) reason = "no such place, or another record lies there";
  }
  const std::lock_guard lock(mutex_);
  if (!reason.empty()) {
    ++counts_.refused;
    ++misses_[reason];
    return reason;
  }
  Entry entry;
  used_ += extent->length;
  entry.extent = std::move(*extent);
  entry.num_bytes = value.info.stored_bytes;
  entry.state = State::kWritten;
  entry.info = value.info;
  entry.indexed = true;
  entry.claims = 0;
  entry.hits = entry.indexed_hits = value.hits;
  by_digest_[value.info.digest] = next_slot_;
  slots_.emplace(next_slot_, std::move(entry));
  shelve(next_slot_++, value.info.sequence);
  if (sequence_ <= value.info.sequence) sequence_ = value.info.sequence + 1;
  ++counts_.adopted;
  return {};
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

void Disk::journal(IndexChange change, Extent freed) {
  pending_bytes_ += freed.length;
  journal_.push_back({std::move(change), std::move(freed)});
  ++journaled_;
  changed_.notify_all();
}

void Disk::journal_hits() {
  const Use use(*this);
  const std::lock_guard lock(mutex_);
  for (auto& [slot, entry] : slots_) {
    if (!entry.indexed || entry.doomed || entry.hits == entry.indexed_hits) continue;
    entry.indexed_hits = entry.hits;
    journal({entry.info.digest, entry.info.sequence, value_of(entry)}, {});
  }
}

std::vector<IndexChange> Disk::take_changes(std::size_t most, double wait_s, double gather_s) {
  const Use use(*this);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, seconds(wait_s), [this] { return !journal_.empty() || closed_; });
  if (!journal_.empty()) {
    changed_.wait_for(lock, seconds(gather_s), [&] { return journal_.size() >= most || closed_ || hurry_; });
  }
  std::vector<Change> taken;
  while (!journal_.empty() && taken.size() < most) {
    taken.push_back(std::move(journal_.front()));
    journal_.pop_front();
  }
  lock.unlock();
  if (options_.durability == Durability::kPower) sync_changes(taken);
  lock.lock();
  std::vector<IndexChange> changes;
  for (const Change& change : taken) changes.push_back(change.change);
  taken_ = std::move(taken);
  return changes;
}

// Syncs what the new records lie in. A failed sync may have dropped the dirty pages, so it is never tried
// again: what was written to that segment stays out of the index.
void Disk::sync_changes(std::vector<Change>& changes) {
  std::set<std::uint32_t> wanted;
  for (const Change& change : changes) {
    if (change.change.value) wanted.insert(change.change.value->place.segment);
  }
  std::set<std::uint32_t> failed;
  for (const SegmentPtr& segment : segments_.list()) {
    if (!wanted.contains(segment->id)) continue;
    try {
      if (!segment->sync_failed && segment->dirty.exchange(false)) {
        sync_segment(*drives_[segment->drive], *segment, Clock::now() + seconds(options_.timeout_s));
      }
    } catch (const Error&) {
      segment->sync_failed = true;
      segments_.quarantine(segment);
    }
    if (segment->sync_failed) failed.insert(segment->id);
  }
  if (failed.empty()) return;
  const std::lock_guard lock(mutex_);
  for (Change& change : changes) {
    if (!change.change.value || !failed.contains(change.change.value->place.segment)) continue;
    forget_change(change);
    ++misses_["sync failed"];
    change.change.value.reset();  // at worst the index holds an older write of the key: its sequence differs
  }
}

void Disk::forget_change(const Change& change) {
  const auto known = by_digest_.find(change.change.digest);
  if (known == by_digest_.end()) return;
  Entry& entry = slots_.at(known->second);
  if (entry.info.sequence == change.change.sequence) entry.indexed = false;
}

void Disk::confirm_changes(bool written) {
  const Use use(*this);
  std::vector<Extent> freed;
  {
    const std::lock_guard lock(mutex_);
    for (auto at = taken_.rbegin(); at != taken_.rend(); ++at) {
      if (!written && !at->change.value) {
        journal_.push_front(std::move(*at));
        continue;
      }
      if (!written) forget_change(*at);
      ++confirmed_;
      if (at->freed.segment) freed.push_back(std::move(at->freed));
    }
    taken_.clear();
  }
  for (const Extent& extent : freed) segments_.release(extent);
  const std::lock_guard lock(mutex_);
  for (const Extent& extent : freed) pending_bytes_ -= extent.length;
  changed_.notify_all();
}

bool Disk::flush(double timeout_s) {
  const Use use(*this);
  std::unique_lock lock(mutex_);
  if (options_.durability == Durability::kScratch) return true;
  const std::uint64_t wanted = journaled_;
  hurry_ = true;
  changed_.notify_all();
  const bool done =
      changed_.wait_for(lock, seconds(timeout_s), [&] { return confirmed_ >= wanted || closed_; });
  hurry_ = false;
  return done && confirmed_ >= wanted;
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
