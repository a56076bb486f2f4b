// The engine of io_uring, by the kernel interface itself: three system calls and two shared rings.
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "engine.hpp"
#include "errors.hpp"
#include "files.hpp"

namespace tiercache {
namespace {

constexpr std::uint64_t kWakeId = ~0ull;

class Map {
 public:
  Map(int fd, std::size_t size, off_t offset) : size_(size) {
    at_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (at_ == MAP_FAILED) throw io_error("mmap of an io_uring ring", errno);
    madvise(at_, size, MADV_DONTFORK);
  }
  ~Map() { munmap(at_, size_); }
  Map(const Map&) = delete;
  Map& operator=(const Map&) = delete;
  template <typename T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(at_) + offset);
  }

 private:
  void* at_;
  std::size_t size_;
};

// The kernel writes heads and tails behind the compiler's back.
unsigned acquire(unsigned* value) { return std::atomic_ref(*value).load(std::memory_order_acquire); }
void publish(unsigned* value, unsigned next) {
  std::atomic_ref(*value).store(next, std::memory_order_release);
}

class UringEngine final : public IoEngine {
 public:
  UringEngine(Fd ring, const io_uring_params& params)
      : ring_(std::move(ring)),
        wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        submissions_(ring_.get(), params.sq_off.array + params.sq_entries * sizeof(unsigned),
                     IORING_OFF_SQ_RING),
        completions_(ring_.get(), params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe),
                     IORING_OFF_CQ_RING),
        entries_(ring_.get(), params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        params_(params) {
    if (!wake_fd_) throw io_error("eventfd of an io_uring engine", errno);
    sq_tail_ = submissions_.at<unsigned>(params.sq_off.tail);
    sq_head_ = submissions_.at<unsigned>(params.sq_off.head);
    cq_head_ = completions_.at<unsigned>(params.cq_off.head);
    cq_tail_ = completions_.at<unsigned>(params.cq_off.tail);
    cqes_ = completions_.at<io_uring_cqe>(params.cq_off.cqes);
    sqes_ = entries_.at<io_uring_sqe>(0);
    auto* array = submissions_.at<unsigned>(params.sq_off.array);
    for (unsigned i = 0; i < params.sq_entries; ++i) array[i] = i;
    watch_wake();
  }

  std::string name() const override { return "io_uring"; }

  bool submit(const IoRequest& request) override {
    io_uring_sqe* entry = next_entry();
    if (!entry) return false;
    entry->user_data = request.id;
    entry->fd = request.fd;
    if (request.kind == IoKind::kSync) {
      entry->opcode = IORING_OP_FSYNC;
      entry->fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
      entry->opcode = request.kind == IoKind::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
      entry->addr = reinterpret_cast<std::uint64_t>(request.parts.data());
      entry->len = request.num_parts;
      entry->off = request.offset;
    }
    push();
    return true;
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    const std::size_t before = done.size();
    bool woken = reap(done);
    while (true) {
      const bool block = done.size() == before && !woken && timeout_ms != 0;
      if (!block && queued_ == 0) return;
      const bool expired = enter(block, timeout_ms);
      woken |= reap(done);
      if (!block || expired || woken || done.size() > before) {
        if (queued_ == 0 || expired) return;
      }
    }
  }

  void wake() override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written =
        write(wake_fd_.get(), &one, sizeof one);  // full counter: awake already
  }

 private:
  io_uring_sqe* next_entry() {
    // One entry stays free for watch_wake(), and never more in flight than completions have room for.
    if (queued_ + 1 >= params_.sq_entries || in_flight_ + 1 >= params_.cq_entries) return nullptr;
    return &(sqes_[local_tail_ & (params_.sq_entries - 1)] = io_uring_sqe{});
  }

  void push() {
    publish(sq_tail_, ++local_tail_);
    ++queued_;
    ++in_flight_;
  }

  void watch_wake() {
    io_uring_sqe& entry = sqes_[local_tail_ & (params_.sq_entries - 1)] = io_uring_sqe{};
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = wake_fd_.get();
    entry.poll32_events = POLLIN;
    entry.user_data = kWakeId;
    push();
  }

  // True when the time-out passed.
  bool enter(bool block, int timeout_ms) {
    __kernel_timespec time{timeout_ms / 1000, (timeout_ms % 1000) * 1000000ll};
    io_uring_getevents_arg argument{};
    if (timeout_ms >= 0) argument.ts = reinterpret_cast<std::uint64_t>(&time);
    const unsigned flags = block ? IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG : 0;
    const long result = syscall(SYS_io_uring_enter, ring_.get(), queued_, block ? 1 : 0, flags,
                                block ? &argument : nullptr, block ? sizeof argument : 0);
    queued_ = local_tail_ - acquire(sq_head_);
    // EAGAIN and EBUSY: the kernel wants completions reaped first, which the caller does next.
    return result < 0 && errno == ETIME;
  }

  bool reap(std::vector<IoDone>& done) {
    bool woken = false;
    unsigned head = *cq_head_;
    for (const unsigned tail = acquire(cq_tail_); head != tail; ++head) {
      const io_uring_cqe& entry = cqes_[head & (params_.cq_entries - 1)];
      --in_flight_;
      if (entry.user_data == kWakeId) {
        woken = true;
      } else {
        done.push_back({entry.user_data, entry.res});
      }
    }
    publish(cq_head_, head);
    if (woken) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t drained = read(wake_fd_.get(), &count, sizeof count);
      watch_wake();
    }
    return woken;
  }

  Fd ring_, wake_fd_;
  Map submissions_, completions_, entries_;
  io_uring_params params_;
  unsigned *sq_tail_, *sq_head_, *cq_head_, *cq_tail_;
  io_uring_cqe* cqes_;
  io_uring_sqe* sqes_;
  unsigned local_tail_ = 0, queued_ = 0, in_flight_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(unsigned depth, std::string& reason) {
  io_uring_params params{};
  Fd ring(static_cast<int>(syscall(SYS_io_uring_setup, depth + 2, &params)));
  if (!ring) {
    reason = std::string("io_uring_setup: ") + std::strerror(errno);
    return nullptr;
  }
  if (!(params.features & IORING_FEAT_EXT_ARG) || !(params.features & IORING_FEAT_NODROP)) {
    reason = "io_uring of a kernel before 5.11";
    return nullptr;
  }
  try {
    return std::make_unique<UringEngine>(std::move(ring), params);
  } catch (const Error& error) {
    reason = error.text;
    return nullptr;
  }
}

}  // namespace tiercache
