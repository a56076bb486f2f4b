#include "drive.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "drive_state.hpp"
#include "waits.hpp"

namespace tiercache {

using Clock = std::chrono::steady_clock;

// Transfers in a row that may end before the first block boundary.
static constexpr unsigned kMaxStuck = 8;

int Job::wait(std::size_t piece, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const bool done = wait_until(changed_, lock, deadline, [&] { return results_[piece] != kPending; });
  return done ? results_[piece] : ETIMEDOUT;
}

int Job::wait_all(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const auto all = [&] { return std::ranges::find(results_, int{kPending}) == results_.end(); };
  if (!wait_until(changed_, lock, deadline, all)) return ETIMEDOUT;
  const auto failed = std::ranges::find_if(results_, [](int code) { return code != 0; });
  return failed == results_.end() ? 0 : *failed;
}

void Job::finish(std::size_t piece, int code) {
  const std::lock_guard lock(mutex_);
  results_[piece] = code;
  changed_.notify_all();
}

bool Drive::State::pop(Piece& next) {
  const bool write_turn = reads.empty() || (!writes.empty() && turns % 16 == 15);
  auto& queue = write_turn ? writes : reads;
  if (queue.empty()) return false;
  ++turns;
  next = std::move(queue.front());
  queue.pop_front();
  return true;
}

// An id is the slot and a count of its uses: a completion that comes twice or from nowhere matches nothing.
bool Drive::State::offer_slot(std::size_t slot) {
  Piece& piece = pieces[slot];
  piece.request.id = (++generation << 16) | slot;
  piece.busy = true;
  if (engine->submit(piece.request)) return true;
  piece.busy = false;
  return false;
}

void Drive::State::start(std::unique_lock<std::mutex>& lock) {
  while (true) {
    if (waiting.empty()) {
      if (free_slots.empty()) return;
      lock.lock();
      Piece next;
      const bool found = pop(next);
      if (found) {
        ++stats.in_flight;
        stats.in_flight_bytes += next.request.length();
      }
      lock.unlock();
      if (!found) return;
      pieces[free_slots.back()] = std::move(next);
      waiting.push_back(free_slots.back());
      free_slots.pop_back();
    }
    if (!offer_slot(waiting.back())) {
      lock.lock();
      ++stats.full_queues;
      lock.unlock();
      return;
    }
    waiting.pop_back();
  }
}

void Drive::State::finish(std::size_t slot, int code) {
  Piece& piece = pieces[slot];
  {
    const std::lock_guard lock(mutex);
    const std::size_t total = piece.request.length() + piece.moved;
    --stats.in_flight;
    stats.in_flight_bytes -= std::min<std::uint64_t>(stats.in_flight_bytes, total);
    if (code != 0) ++stats.errors;
    if (piece.request.kind == IoKind::kRead) ++stats.reads, stats.read_bytes += total;
    if (piece.request.kind == IoKind::kWrite) ++stats.writes, stats.written_bytes += total;
    if (piece.request.kind == IoKind::kSync) ++stats.syncs;
  }
  const std::shared_ptr<Job> job = std::move(piece.job);
  const std::size_t index = piece.index;
  piece = Piece{};
  free_slots.push_back(slot);
  job->finish(index, code);
}

// Drops the first `bytes` of the request.
void advance(IoRequest& request, std::size_t bytes) {
  request.offset += bytes;
  unsigned kept = 0;
  for (unsigned i = 0; i < request.num_parts; ++i) {
    iovec part = request.parts[i];
    const std::size_t gone = std::min(bytes, part.iov_len);
    bytes -= gone;
    part.iov_base = static_cast<char*>(part.iov_base) + gone;
    part.iov_len -= gone;
    if (part.iov_len > 0) request.parts[kept++] = part;
  }
  request.num_parts = kept;
}

void Drive::State::complete(const std::vector<IoDone>& done) {
  for (const IoDone& one : done) {
    const std::size_t slot = one.id & 0xFFFF;
    if (slot >= pieces.size() || !pieces[slot].busy || pieces[slot].request.id != one.id) {
      const std::lock_guard lock(mutex);
      ++stats.unknown_completions;
      continue;
    }
    Piece& piece = pieces[slot];
    piece.busy = false;
    const std::size_t length = piece.request.length();
    if (one.result == -EINTR || one.result == -EAGAIN) {
      waiting.push_back(slot);
    } else if (one.result < 0) {
      finish(slot, static_cast<int>(-one.result));
    } else if (piece.request.kind == IoKind::kSync || static_cast<std::size_t>(one.result) >= length) {
      finish(slot, 0);
    } else if (one.result == 0) {
      finish(slot, piece.request.kind == IoKind::kRead ? ENODATA : EIO);
    } else {
      // Direct I/O continues on a block boundary; what lies between is carried again.
      const std::size_t moved = static_cast<std::size_t>(one.result) / 4096 * 4096;
      {
        const std::lock_guard lock(mutex);
        ++stats.short_transfers;
      }
      if (moved == 0 && ++piece.stuck > kMaxStuck) {
        finish(slot, piece.request.kind == IoKind::kRead ? ENODATA : EIO);
        continue;
      }
      piece.moved += moved;
      advance(piece.request, moved);
      waiting.push_back(slot);
    }
  }
}

void Drive::run(const std::shared_ptr<State>& state) {
  std::vector<IoDone> done;
  std::unique_lock lock(state->mutex, std::defer_lock);
  DriveStats seen;
  double read_busy = 0, write_busy = 0;
  while (true) {
    state->start(lock);
    lock.lock();
    const bool idle = state->stats.in_flight == 0;
    if (idle) state->idle.notify_all();
    if (idle && state->stopping && state->reads.empty() && state->writes.empty()) return;
    const bool more = !state->free_slots.empty() && (!state->reads.empty() || !state->writes.empty());
    state->sleeping = !more;
    const bool reading = state->stats.in_flight > 0;
    lock.unlock();
    done.clear();
    const auto before = Clock::now();
    state->engine->wait(done, more ? 0 : -1);
    const double waited = std::chrono::duration<double>(Clock::now() - before).count();
    lock.lock();
    state->sleeping = false;
    lock.unlock();
    state->complete(done);
    // Bandwidth of each direction over windows of 50 busy milliseconds.
    lock.lock();
    DriveStats& now = state->stats;
    const double reads = static_cast<double>(now.read_bytes - seen.read_bytes);
    const double writes = static_cast<double>(now.written_bytes - seen.written_bytes);
    if (reading) (reads >= writes ? read_busy : write_busy) += waited;
    if (read_busy + write_busy > 0.05) {
      const auto blend = [](double& average, double fresh) {
        average = average > 0 ? 0.7 * average + 0.3 * fresh : fresh;
      };
      if (reads > 0 && read_busy > 0.01) blend(now.read_bytes_per_s, reads / read_busy);
      if (writes > 0 && write_busy > 0.01) blend(now.write_bytes_per_s, writes / write_busy);
      seen = now;
      read_busy = write_busy = 0;
    }
    lock.unlock();
  }
}

Drive::Drive(std::unique_ptr<IoEngine> engine, unsigned depth, std::size_t inline_bytes)
    : state_(std::make_shared<State>(std::move(engine), depth)),
      engine_name_(state_->engine->name()),
      depth_(depth),
      inline_bytes_(inline_bytes) {
  thread_ = std::thread([state = state_] { run(state); });
}

Drive::~Drive() {
  if (!thread_.joinable()) return;
  drain(Clock::time_point::max());
  thread_.join();
}

void Drive::offer(const std::shared_ptr<Job>& job, std::size_t piece, const IoRequest& request) {
  bool wake = false;
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->stopping) {
      (request.kind == IoKind::kRead ? state_->reads : state_->writes)
          .push_back({job, piece, request, 0, 0, false});
      wake = std::exchange(state_->sleeping, false);
    } else {
      wake = false;
      job->finish(piece, ECANCELED);
      return;
    }
  }
  if (wake) state_->engine->wake();
}

void Drive::cancel(const std::shared_ptr<Job>& job, int code) {
  const std::lock_guard lock(state_->mutex);
  for (auto* queue : {&state_->reads, &state_->writes}) {
    std::erase_if(*queue, [&](const Piece& piece) {
      if (piece.job != job) return false;
      job->finish(piece.index, code);
      return true;
    });
  }
}

bool Drive::drain(Clock::time_point deadline) {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  for (auto* queue : {&state_->reads, &state_->writes}) {
    for (const Piece& piece : *queue) piece.job->finish(piece.index, ECANCELED);
    queue->clear();
  }
  lock.unlock();
  state_->engine->wake();
  lock.lock();
  const auto calm = [&] { return state_->stats.in_flight == 0; };
  if (deadline == Clock::time_point::max()) {
    state_->idle.wait(lock, calm);
    return true;
  }
  return state_->idle.wait_until(lock, deadline, calm);
}

void Drive::abandon() { thread_.detach(); }

DriveStats Drive::stats() const {
  const std::lock_guard lock(state_->mutex);
  DriveStats stats = state_->stats;
  stats.queued = state_->reads.size() + state_->writes.size();
  return stats;
}

}  // namespace tiercache
