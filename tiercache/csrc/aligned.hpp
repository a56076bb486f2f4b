// Memory on block boundaries, as direct I/O needs it, and a bounded pool of it.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "record.hpp"
#include "waits.hpp"

namespace tiercache {

// Zeroed, of a whole number of blocks.
class AlignedMemory {
 public:
  AlignedMemory() = default;
  explicit AlignedMemory(std::size_t size)
      : data_(static_cast<std::uint8_t*>(std::aligned_alloc(kBlock, size))) {
    if (!data_) throw std::bad_alloc();
    std::memset(data_, 0, size);
  }
  AlignedMemory(AlignedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  AlignedMemory& operator=(AlignedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~AlignedMemory() { std::free(data_); }
  std::uint8_t* data() const noexcept { return data_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::uint8_t* data_ = nullptr;
};

// At most `count` buffers of `size` bytes, made at first use. Who holds one must not wait for another.
class BufferPool {
 public:
  BufferPool(std::size_t size, unsigned count) : size_(size), left_(count) {}

  // An empty buffer when none came free until the deadline.
  AlignedMemory acquire(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    if (!wait_until(freed_, lock, deadline, [&] { return !free_.empty() || left_ > 0; })) return {};
    if (free_.empty()) {
      --left_;
      lock.unlock();
      return AlignedMemory(size_);
    }
    AlignedMemory found = std::move(free_.back());
    free_.pop_back();
    return found;
  }

  void release(AlignedMemory buffer) {
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(std::move(buffer));
    }
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<AlignedMemory> free_;
  std::size_t size_;
  unsigned left_;
};

}  // namespace tiercache
