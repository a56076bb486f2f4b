#include "arena.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "errors.hpp"

namespace tiercache {
namespace {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

int class_of(std::uint64_t num_bytes) {
  if (num_bytes > 2048) return -1;
  return static_cast<int>(std::bit_width(std::max<std::uint64_t>(num_bytes, 64) - 1)) - 6;
}

}  // namespace

Arena::Arena(std::uint64_t capacity_bytes, std::uint64_t staging_bytes, const MemoryOptions& options)
    : capacity_(capacity_bytes / kPage * kPage),
      memory_(capacity_ + round_up(staging_bytes, kPage), options) {
  main_.begin = 0;
  main_.size = capacity_;
  staging_.begin = capacity_;
  staging_.size = memory_.size() - capacity_;
  main_.free.release(main_.begin, main_.size);
  staging_.free.release(staging_.begin, staging_.size);
}

std::optional<std::uint64_t> Arena::take(Region& region, std::uint64_t num_bytes) {
  const int cell_class = class_of(num_bytes);
  if (cell_class < 0) {
    const std::uint64_t room = round_up(num_bytes, kPage);
    const auto offset = region.free.allocate(room);
    if (offset) slots_.emplace(*offset, Slot{num_bytes, room, -1});
    return offset;
  }
  auto& cells = region.cells[static_cast<std::size_t>(cell_class)];
  const std::uint64_t cell = 64ull << cell_class;
  if (cells.empty()) {
    const auto page = region.free.allocate(kPage);
    if (!page) return std::nullopt;
    for (std::uint64_t at = *page + kPage; at > *page; at -= cell) cells.push_back(at - cell);
  }
  const std::uint64_t offset = cells.back();
  cells.pop_back();
  ++region.cells_used[offset / kPage];
  slots_.emplace(offset, Slot{num_bytes, cell, cell_class});
  return offset;
}

// A page whose last cell is given back becomes whole again.
void Arena::give_cell(Region& region, std::uint64_t offset, int cell_class) {
  auto& cells = region.cells[static_cast<std::size_t>(cell_class)];
  cells.push_back(offset);
  const std::uint64_t page = offset / kPage;
  const auto used = region.cells_used.find(page);
  if (--used->second != 0) return;
  region.cells_used.erase(used);
  std::erase_if(cells, [page](std::uint64_t cell) { return cell / kPage == page; });
  region.free.release(page * kPage, kPage);
}

std::uint64_t Arena::reserve(std::uint64_t num_bytes, double timeout_s, bool staging) {
  Region& region = staging ? staging_ : main_;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  std::unique_lock lock(mutex_);
  if (num_bytes == 0) throw Error(ErrorKind::kConfig, "host tier: reserve of no bytes");
  bool waited = false;
  while (true) {
    if (const auto offset = take(region, num_bytes)) return *offset;
    const std::string room = std::to_string(region.free.free_units()) + " bytes free in " +
                             std::to_string(region.free.count()) + " extents of " +
                             std::to_string(region.size);
    if (timeout_s <= 0 || num_bytes > region.size) {
      throw Error(ErrorKind::kFull, "host tier: reserve of " + std::to_string(num_bytes) + " bytes", room,
                  std::to_string(region.size), "free or demote pages, or raise the host budget");
    }
    if (!waited) ++waits_;
    waited = true;
    if (freed_.wait_until(lock, deadline) == std::cv_status::timeout) {
      ++timeouts_;
      throw Error(ErrorKind::kTimeout, "host tier: reserve of " + std::to_string(num_bytes) + " bytes", room,
                  std::to_string(timeout_s) + " s", "release leases or raise the host budget");
    }
  }
}

void Arena::release(std::uint64_t offset) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = slots_.find(offset);
    if (found == slots_.end()) {
      throw Error(ErrorKind::kState, "host tier: free of a slot that is not reserved",
                  std::to_string(offset));
    }
    const Slot slot = found->second;
    slots_.erase(found);
    Region& region = region_of(offset);
    if (slot.cell_class < 0) {
      region.free.release(offset, slot.room);
    } else {
      give_cell(region, offset, slot.cell_class);
    }
  }
  freed_.notify_all();
}

std::uint64_t Arena::slot_bytes(std::uint64_t offset) const {
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(offset);
  if (found == slots_.end()) {
    throw Error(ErrorKind::kState, "host tier: use of a slot that is not reserved", std::to_string(offset));
  }
  return found->second.bytes;
}

std::uint64_t Arena::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return main_.size - main_.free.free_units();
}

ArenaStats Arena::stats() const {
  const std::lock_guard lock(mutex_);
  return {capacity_,
          main_.size - main_.free.free_units(),
          slots_.size(),
          staging_.size,
          staging_.size - staging_.free.free_units(),
          main_.free.largest(),
          waits_,
          timeouts_};
}

void Arena::check_integrity() const {
  const std::lock_guard lock(mutex_);
  for (const Region* region : {&main_, &staging_}) {
    std::uint64_t pages = region->cells_used.size() * kPage, cells = 0, cells_in_use = 0;
    for (const auto& [offset, slot] : slots_) {
      if (offset < region->begin || offset >= region->begin + region->size) continue;
      if (slot.cell_class < 0) pages += slot.room;
      if (slot.cell_class >= 0) ++cells;
    }
    for (const auto& [page, used] : region->cells_used) cells_in_use += used;
    if (!region->free.consistent())
      throw Error(ErrorKind::kState, "host tier: free extents overlap or are miscounted");
    if (pages != region->size - region->free.free_units() || cells != cells_in_use) {
      throw Error(ErrorKind::kState, "host tier: slots and used bytes differ", std::to_string(pages),
                  std::to_string(region->size - region->free.free_units()));
    }
  }
}

}  // namespace tiercache
