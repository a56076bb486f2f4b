// Disk::scan: records found from the segments alone.
#include <algorithm>
#include <cstring>
#include <set>

#include "disk.hpp"
#include "disk_use.hpp"
#include "errors.hpp"

namespace tiercache {

std::vector<std::uint32_t> Disk::segment_ids() const {
  check_process();
  std::vector<std::uint32_t> ids;
  for (const SegmentPtr& segment : segments_.list()) ids.push_back(segment->id);
  return ids;
}

void Disk::scan_segment(const SegmentPtr& segment, std::vector<IndexValue>& found, ScanReport& report) {
  constexpr std::uint64_t kWindow = 1 << 20;
  const AlignedMemory window(kWindow);
  std::uint64_t window_begin = 0, window_end = 0, offset = kBlock;
  std::vector<std::uint8_t> payload;
  while (offset + kBlock <= segment->size) {
    if (offset < window_begin || offset + kBlock > window_end) {
      window_begin = offset;
      window_end = std::min(offset + kWindow, segment->size);
      const int code = read_full(segment->fd.get(), window.data(), window_end - window_begin, window_begin);
      if (code != 0) {
        report.bad.push_back(segment->path + " at " + std::to_string(offset) + ": " + std::strerror(code));
        return;
      }
    }
    const auto& header = *reinterpret_cast<const RecordHeader*>(window.data() + (offset - window_begin));
    const RecordPlace place{segment->epoch, offset, segment->id, 0};
    report.bytes += kBlock;
    if (!refuse_record(header, options_.segments.uuid, place, segment->size - offset).empty()) {
      offset += kBlock;
      continue;
    }
    const RecordInfo info = header.info;
    std::string reason;
    // Twice the size for an aligned start: no bounce buffer.
    payload.resize(info.stored_bytes + kBlock);
    auto* const at =
        payload.data() + (kBlock - reinterpret_cast<std::uintptr_t>(payload.data()) % kBlock) % kBlock;
    try {
      read_record(path_of({segment, offset, record_length(info.stored_bytes)}, true), offset, at, info);
    } catch (const Error& error) {
      reason = error.text + ": " + error.got;
    }
    if (!reason.empty()) {
      // Its blocks may hold younger records: go on with the next block.
      if (info.flags & kPersistent) report.bad.push_back(reason);
      offset += kBlock;
      continue;
    }
    ++report.found;
    report.bytes += record_length(info.stored_bytes) - kBlock;
    if (info.flags & kPersistent) {
      IndexValue value;
      value.info = info;
      value.place = place;
      seal(value);
      found.push_back(value);
    }
    offset += record_length(info.stored_bytes);
  }
}

ScanReport Disk::scan(const std::vector<std::uint32_t>& wanted) {
  const Use use(*this);
  ScanReport report;
  std::vector<IndexValue> found;
  for (const SegmentPtr& segment : segments_.list()) {
    if (std::ranges::find(wanted, segment->id) != wanted.end()) scan_segment(segment, found, report);
  }
  std::ranges::sort(
      found, [](const IndexValue& a, const IndexValue& b) { return a.info.sequence > b.info.sequence; });
  for (const IndexValue& value : found) {
    {
      const std::lock_guard lock(mutex_);
      const auto known = by_digest_.find(value.info.digest);
      if (known != by_digest_.end()) {
        if (slots_.at(known->second).info.sequence >= value.info.sequence) continue;
        end_entry(known->second);
      }
    }
    if (!adopt(value).empty()) continue;
    ++report.adopted;
    const std::lock_guard lock(mutex_);
    if (options_.durability != Durability::kScratch)
      journal({value.info.digest, value.info.sequence, value}, {});
  }
  return report;
}

}  // namespace tiercache
