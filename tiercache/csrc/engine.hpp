// How bytes reach a drive. One engine a drive, used by that drive's thread alone (but for wake()).
#pragma once
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tiercache {

enum class IoKind : std::uint8_t { kRead, kWrite, kSync };

// One operation. `parts` and the memory behind them stay valid until the completion with this id came back.
struct IoRequest {
  std::uint64_t id = 0;
  IoKind kind = IoKind::kRead;
  int fd = -1;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::array<iovec, 3> parts{};
  unsigned num_parts = 0;

  std::size_t length() const noexcept {
    std::size_t sum = 0;
    for (unsigned i = 0; i < num_parts; ++i) sum += parts[i].iov_len;
    return sum;
  }
};

struct IoDone {
  std::uint64_t id;
  std::int64_t result;  // bytes, or -errno
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual std::string name() const = 0;
  // False when the queue is full: wait for a completion, then offer the request again.
  virtual bool submit(const IoRequest& request) = 0;
  // Appends at least one completion unless wake() was called or `timeout_ms` passed (-1: none). Completions
  // come in any order.
  virtual void wait(std::vector<IoDone>& done, int timeout_ms) = 0;
  // Ends a wait(), now or the next one. From any thread.
  virtual void wake() = 0;
};

// pread/pwrite on `threads` threads.
std::unique_ptr<IoEngine> make_thread_engine(unsigned threads, unsigned depth);

// io_uring by the raw kernel interface; nullptr and the reason when the kernel refuses.
std::unique_ptr<IoEngine> make_uring_engine(unsigned depth, std::string& reason);

// Carries a written pattern through the engine and back at `offset` of `fd`, of which `size` bytes are free
// to use. Empty text when every byte came back, else what went wrong.
std::string prove_engine(IoEngine& engine, int fd, std::uint64_t offset, std::size_t size);

}  // namespace tiercache
