// The part of Disk behind the index: look-ups, the journal of changes, recovery.
#include <set>
#include <utility>

#include "disk.hpp"
#include "disk_use.hpp"
#include "errors.hpp"
#include "waits.hpp"

namespace tiercache {

IndexValue Disk::value_of(const Entry& entry) const {
  IndexValue value;
  value.info = entry.info;
  value.place = {entry.extent.segment->epoch, entry.extent.offset, entry.extent.segment->id, 0};
  value.hits = entry.hits;
  seal(value);
  return value;
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

std::vector<Disk::Found> Disk::lookup(const std::vector<Digest>& digests) {
  check_process();
  const std::lock_guard lock(mutex_);
  check_open();  // and no Use: it ends before the mutex is let go, so close() has nothing to wait for
  std::vector<Found> all(digests.size());
  for (std::size_t i = 0; i < digests.size(); ++i) {
    const auto found = by_digest_.find(digests[i]);
    if (found == by_digest_.end()) continue;
    Entry& entry = slots_.at(found->second);
    if (entry.claims++ == 0) unshelve(found->second);
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
      wait_until(changed_, lock, deadline_in(timeout_s), [&] { return confirmed_ >= wanted || closed_; });
  hurry_ = false;
  return done && confirmed_ >= wanted;
}

}  // namespace tiercache
