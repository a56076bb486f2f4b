// One drive: a queue for reads, one for writes, and the thread that feeds an engine from them.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine.hpp"

namespace tiercache {

// Operations that a caller waits for together. Pieces finish in any order; each has its own result.
class Job {
 public:
  explicit Job(std::size_t pieces) : results_(pieces, kPending) {}

  // Waits for one piece (or all): 0 or an errno; ETIMEDOUT when the deadline passed first.
  int wait(std::size_t piece, std::chrono::steady_clock::time_point deadline);
  int wait_all(std::chrono::steady_clock::time_point deadline);

 private:
  friend class Drive;
  static constexpr int kPending = -1;
  void finish(std::size_t piece, int code);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> results_;
};

struct DriveStats {
  std::uint64_t reads = 0, writes = 0, syncs = 0, read_bytes = 0, written_bytes = 0;
  std::uint64_t inline_requests = 0, inline_bytes = 0;  // of carry(), beside the counts above
  std::uint64_t short_transfers = 0, errors = 0, full_queues = 0, unknown_completions = 0;
  std::uint64_t queued = 0, in_flight = 0, in_flight_bytes = 0;
  double read_bytes_per_s = 0, write_bytes_per_s = 0;  // measured while busy
};

class Drive {
 public:
  // Requests of up to `inline_bytes` may be carried out by their callers, see carry(); 0: none.
  Drive(std::unique_ptr<IoEngine> engine, unsigned depth, std::size_t inline_bytes);
  // Ends the thread after what is in flight came back; see drain().
  ~Drive();
  Drive(const Drive&) = delete;
  Drive& operator=(const Drive&) = delete;

  // Queues one piece of `job`. The request's memory stays valid until that piece has finished. Reads go
  // first; every sixteenth operation is a write when one waits. `id` is set here.
  void offer(const std::shared_ptr<Job>& job, std::size_t piece, const IoRequest& request);

  // Carries a small request out in the calling thread, which waits for it anyway: two changes of thread less.
  // False when it is too long, `depth` callers are at it already, or the drive ends: offer() it then.
  bool carry(const std::shared_ptr<Job>& job, std::size_t piece, const IoRequest& request);

  // Takes back what is queued but not in flight: those pieces finish with `code`.
  void cancel(const std::shared_ptr<Job>& job, int code);

  // No more offers: queued pieces finish with ECANCELED, then waits for what is in flight. False at the
  // deadline: the thread then still owns its buffers and must be abandoned, not joined.
  bool drain(std::chrono::steady_clock::time_point deadline);
  void abandon();

  DriveStats stats() const;
  std::string engine_name() const { return engine_name_; }

 private:
  struct Piece {
    std::shared_ptr<Job> job;
    std::size_t index = 0;
    IoRequest request;
    std::size_t moved = 0;  // bytes of earlier, short transfers
    unsigned stuck = 0;     // transfers without progress
    bool busy = false;
  };
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::string engine_name_;
  std::size_t depth_, inline_bytes_;
  std::thread thread_;
};

}  // namespace tiercache
