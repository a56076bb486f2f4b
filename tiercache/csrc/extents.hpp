// Free room of one address range, as an exact list of extents. No rounding beyond the caller's own alignment.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace tiercache {

// Best fit by size, lowest address first among equals; neighbours coalesce on release. Not safe from several
// threads: the owner holds its lock.
class ExtentMap {
 public:
  ExtentMap() = default;
  ExtentMap(std::uint64_t offset, std::uint64_t length) { release(offset, length); }

  // Start of `length` units of room, or nothing.
  std::optional<std::uint64_t> allocate(std::uint64_t length);

  // Takes exactly this range out of the free room; false and no change when it is not wholly free.
  bool claim(std::uint64_t offset, std::uint64_t length);

  // Gives a range back. Throws Error(kState) when part of it is free already.
  void release(std::uint64_t offset, std::uint64_t length);

  std::uint64_t free_units() const noexcept { return free_; }
  std::uint64_t largest() const noexcept { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t count() const noexcept { return by_offset_.size(); }

  // Sum and order are as the books say, and no two extents touch.
  bool consistent() const;

 private:
  void insert(std::uint64_t offset, std::uint64_t length);
  void erase(std::map<std::uint64_t, std::uint64_t>::iterator at);

  std::map<std::uint64_t, std::uint64_t> by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
  std::uint64_t free_ = 0;
};

}  // namespace tiercache
