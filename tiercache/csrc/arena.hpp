// The host tier's memory: slots in one mapping, with a part kept apart for bytes on their way.
#pragma once
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "extents.hpp"
#include "memory.hpp"

namespace tiercache {

struct ArenaStats {
  std::uint64_t capacity_bytes, used_bytes, slots, staging_bytes, staging_used_bytes, largest_free_bytes;
  std::uint64_t waits, timeouts;
};

// Slots of 4 KiB and more are exact runs of 4 KiB pages (best fit, neighbours coalesce); smaller ones come
// from size classes of 64 to 2048 bytes that share a page. Safe from several threads.
//
//     | main: slots of reserve()                        | staging: slots of reserve(staging) |
//     0                                   capacity_bytes                     + staging_bytes
class Arena {
 public:
  Arena(std::uint64_t capacity_bytes, std::uint64_t staging_bytes, const MemoryOptions& options);

  // Offset of a slot, or waits until `timeout_s` for room. Throws kFull at once when timeout_s is 0 or the
  // slot could never fit, kTimeout at the deadline.
  std::uint64_t reserve(std::uint64_t num_bytes, double timeout_s, bool staging);
  void release(std::uint64_t offset);

  std::uint8_t* at(std::uint64_t offset) const noexcept { return memory_.data() + offset; }
  std::uint64_t slot_bytes(std::uint64_t offset) const;
  std::uint64_t capacity_bytes() const noexcept { return capacity_; }
  std::uint64_t used_bytes() const;
  ArenaStats stats() const;
  bool cuda_registered() const noexcept { return memory_.cuda_registered(); }
  bool numa_bound() const noexcept { return memory_.numa_bound(); }
  // Throws kState with what does not add up.
  void check_integrity() const;

 private:
  static constexpr std::uint64_t kPage = 4096;
  static constexpr std::size_t kClasses = 6;  // 64, 128, 256, 512, 1024, 2048
  struct Slot {
    std::uint64_t bytes;  // as asked for
    std::uint64_t room;   // as taken: whole pages, or one cell of a class
    int cell_class;       // -1 for whole pages
  };
  struct Region {
    ExtentMap free;
    std::array<std::vector<std::uint64_t>, kClasses> cells;       // free cells
    std::unordered_map<std::uint64_t, std::uint64_t> cells_used;  // page -> cells in use
    std::uint64_t begin = 0, size = 0;
  };
  std::optional<std::uint64_t> take(Region& region, std::uint64_t num_bytes);
  void give_cell(Region& region, std::uint64_t offset, int cell_class);
  Region& region_of(std::uint64_t offset) { return offset < capacity_ ? main_ : staging_; }

  std::uint64_t capacity_;
  Mapping memory_;
  mutable std::mutex mutex_;
  std::condition_variable freed_;
  Region main_, staging_;
  std::unordered_map<std::uint64_t, Slot> slots_;
  std::uint64_t waits_ = 0, timeouts_ = 0;
};

}  // namespace tiercache
