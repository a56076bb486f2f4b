#include "segments.hpp"

#include <algorithm>
#include <numeric>

#include "errors.hpp"

namespace tiercache {

Segments::Segments(SegmentOptions options) : options_(std::move(options)) {
  if (options_.segment_bytes == 0) {
    options_.segment_bytes =
        std::clamp<std::uint64_t>(options_.capacity_bytes / 64, 16ull << 20, 512ull << 20);
  }
  options_.capacity_bytes = options_.capacity_bytes / kBlock * kBlock;
  options_.segment_bytes = std::min(options_.segment_bytes / kBlock * kBlock, options_.capacity_bytes);
  if (options_.segment_bytes < 3 * kBlock) {
    throw Error(ErrorKind::kConfig, "disk tier: capacity_bytes", std::to_string(options_.capacity_bytes),
                std::to_string(3 * kBlock) + " or more");
  }
  for (const std::string& path : options_.directories) {
    DriveDir drive;
    drive.path = path;
    drive.fd = open_directory(path, true);
    drive.direct = options_.direct;
    drives_.push_back(std::move(drive));
  }
}

std::optional<Extent> Segments::take(std::uint32_t drive, std::uint64_t length) {
  for (const auto& [id, segment] : segments_) {
    if (segment->drive != drive || segment->quarantined || segment->free.largest() < length) continue;
    if (const auto offset = segment->free.allocate(length)) return Extent{segment, *offset, length};
  }
  return std::nullopt;
}

std::optional<Extent> Segments::allocate(std::uint64_t length, const Load& load) {
  std::vector<std::uint32_t> order(drives_.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> loads(drives_.size());
  if (drives_.size() > 1) {
    for (const std::uint32_t drive : order) loads[drive] = load(drive);
  }
  for (int round = 0; round < 2; ++round) {
    {
      const std::lock_guard lock(mutex_);
      std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) {
        return std::pair(loads[a], drives_[a].bytes) < std::pair(loads[b], drives_[b].bytes);
      });
      if (round == 1) recall_leased();
    }
    for (const std::uint32_t drive : order) {
      {
        const std::lock_guard lock(mutex_);
        if (drives_[drive].off) continue;
        if (auto extent = take(drive, length)) return extent;
      }
      while (grow(drive, length)) {
        const std::lock_guard lock(mutex_);
        if (auto extent = take(drive, length)) return extent;
      }
    }
  }
  return std::nullopt;
}

void Segments::release(const Extent& extent) {
  const std::lock_guard lock(mutex_);
  if (options_.shared && range_is_locked(extent.segment->fd.get(), extent.offset, extent.length)) {
    leased_.push_back(extent);
  } else {
    extent.segment->free.release(extent.offset, extent.length);
  }
}

void Segments::recall_leased() {
  std::erase_if(leased_, [](const Extent& extent) {
    if (range_is_locked(extent.segment->fd.get(), extent.offset, extent.length)) return false;
    extent.segment->free.release(extent.offset, extent.length);
    return true;
  });
}

void Segments::withhold(const Extent& extent) {
  const std::lock_guard lock(mutex_);
  extent.segment->withheld += extent.length;
}

std::optional<Extent> Segments::claim(const RecordPlace& place, std::uint64_t length) {
  const std::lock_guard lock(mutex_);
  const auto found = segments_.find(place.segment);
  if (found == segments_.end() || found->second->epoch != place.epoch) return std::nullopt;
  if (place.offset % kBlock != 0 || place.offset < kBlock) return std::nullopt;
  if (!found->second->free.claim(place.offset, length)) return std::nullopt;
  return Extent{found->second, place.offset, length};
}

void Segments::quarantine(const SegmentPtr& segment) {
  const std::lock_guard lock(mutex_);
  segment->quarantined = true;
  DriveDir& drive = drives_[segment->drive];
  if (++drive.errors >= options_.max_errors) drive.off = true;
}

std::vector<SegmentPtr> Segments::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<SegmentPtr> all;
  for (const auto& [id, segment] : segments_) all.push_back(segment);
  return all;
}

SegmentsStats Segments::stats() const {
  const std::lock_guard lock(mutex_);
  SegmentsStats stats;
  for (const auto& [id, segment] : segments_) {
    ++stats.segments;
    stats.file_bytes += segment->size;
    stats.free_bytes += segment->free.free_units();
    stats.withheld_bytes += segment->withheld;
    if (segment->quarantined) ++stats.quarantined;
  }
  for (const Extent& extent : leased_) stats.leased_bytes += extent.length;
  for (const DriveDir& drive : drives_) stats.drives_off += drive.off ? 1 : 0;
  stats.growth_refused = growth_refused_;
  stats.removed = removed_;
  return stats;
}

std::uint64_t Segments::largest_record() const { return options_.capacity_bytes - kBlock; }

bool Segments::consistent(std::uint64_t used_bytes) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t files = 0, free = 0, withheld = 0, leased = 0, headers = 0;
  for (const auto& [id, segment] : segments_) {
    if (!segment->free.consistent()) return false;
    files += segment->size;
    free += segment->free.free_units();
    withheld += segment->withheld;
    headers += kBlock;
  }
  for (const Extent& extent : leased_) leased += extent.length;
  return files <= options_.capacity_bytes && files == free + withheld + leased + headers + used_bytes;
}

}  // namespace tiercache
