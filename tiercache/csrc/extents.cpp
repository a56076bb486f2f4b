#include "extents.hpp"

#include "errors.hpp"

namespace tiercache {

void ExtentMap::insert(std::uint64_t offset, std::uint64_t length) {
  if (length == 0) return;
  by_offset_.emplace(offset, length);
  by_size_.emplace(length, offset);
}

void ExtentMap::erase(std::map<std::uint64_t, std::uint64_t>::iterator at) {
  by_size_.erase({at->second, at->first});
  by_offset_.erase(at);
}

std::optional<std::uint64_t> ExtentMap::allocate(std::uint64_t length) {
  const auto found = by_size_.lower_bound({length, 0});
  if (length == 0 || found == by_size_.end()) return std::nullopt;
  const std::uint64_t offset = found->second;
  claim(offset, length);
  return offset;
}

bool ExtentMap::claim(std::uint64_t offset, std::uint64_t length) {
  auto at = by_offset_.upper_bound(offset);
  if (length == 0 || at == by_offset_.begin()) return false;
  --at;
  const auto [start, room] = *at;
  if (offset - start > room || room - (offset - start) < length) return false;
  erase(at);
  insert(start, offset - start);
  insert(offset + length, start + room - offset - length);
  free_ -= length;
  return true;
}

void ExtentMap::release(std::uint64_t offset, std::uint64_t length) {
  if (length == 0) return;
  const std::uint64_t released = length;
  auto next = by_offset_.lower_bound(offset);
  const bool hits_next = next != by_offset_.end() && next->first - offset < length;
  bool hits_previous = false;
  if (next != by_offset_.begin()) {
    auto previous = std::prev(next);
    hits_previous = offset - previous->first < previous->second;
  }
  if (hits_next || hits_previous) {
    throw Error(ErrorKind::kState, "release of an extent that is free already", std::to_string(offset));
  }
  if (next != by_offset_.end() && next->first == offset + length) {
    length += next->second;
    auto gone = next++;
    erase(gone);
  }
  if (next != by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      length += previous->second;
      erase(previous);
    }
  }
  insert(offset, length);
  free_ += released;
}

bool ExtentMap::consistent() const {
  std::uint64_t sum = 0, end = 0;
  bool first = true;
  for (const auto& [offset, length] : by_offset_) {
    if (length == 0 || (!first && offset <= end) || !by_size_.contains({length, offset})) return false;
    sum += length;
    end = offset + length;
    first = false;
  }
  return sum == free_ && by_size_.size() == by_offset_.size();
}

}  // namespace tiercache
