// The engine of pread and pwrite: works wherever files do.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "engine.hpp"

namespace tiercache {
namespace {

std::int64_t carry_out(const IoRequest& request) {
  const auto count = static_cast<int>(request.num_parts);
  const auto offset = static_cast<off_t>(request.offset);
  ssize_t result = 0;
  switch (request.kind) {
    case IoKind::kRead:
      result = preadv(request.fd, request.parts.data(), count, offset);
      break;
    case IoKind::kWrite:
      result = pwritev(request.fd, request.parts.data(), count, offset);
      break;
    case IoKind::kSync:
      result = fdatasync(request.fd);
      break;
  }
  return result < 0 ? -errno : result;
}

class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(unsigned threads, unsigned depth) : depth_(depth) {
    for (unsigned i = 0; i < threads; ++i)
      crew_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }

  ~ThreadEngine() override {
    for (auto& thread : crew_) thread.request_stop();
    offered_.notify_all();
  }

  std::string name() const override { return "threads"; }

  bool submit(const IoRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_ >= depth_) return false;
      ++in_flight_;
      queue_.push_back(request);
    }
    offered_.notify_one();
    return true;
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return woken_ || !done_.empty(); };
    if (timeout_ms < 0) {
      finished_.wait(lock, ready);
    } else {
      finished_.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready);
    }
    woken_ = false;
    in_flight_ -= done_.size();
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    finished_.notify_one();
  }

 private:
  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (true) {
      offered_.wait(lock, [&] { return stop.stop_requested() || !queue_.empty(); });
      if (queue_.empty()) return;
      const IoRequest request = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const std::int64_t result = carry_out(request);
      lock.lock();
      done_.push_back({request.id, result});
      finished_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable offered_, finished_;
  std::deque<IoRequest> queue_;
  std::vector<IoDone> done_;
  std::size_t depth_, in_flight_ = 0;
  bool woken_ = false;
  std::vector<std::jthread> crew_;  // last: joined before the queues go
};

}  // namespace

std::unique_ptr<IoEngine> make_thread_engine(unsigned threads, unsigned depth) {
  return std::make_unique<ThreadEngine>(threads, depth);
}

}  // namespace tiercache
