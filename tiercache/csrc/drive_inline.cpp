// Drive::carry: small requests in the calling thread.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "drive.hpp"
#include "drive_state.hpp"

namespace tiercache {
namespace {

constexpr unsigned kMaxTries = 16;  // transfers that end before the first block boundary, or are interrupted

// 0 or an errno; ENODATA at the end of the file.
int carry_out(IoRequest request) {
  const bool reading = request.kind == IoKind::kRead;
  for (unsigned tries = 0; tries < kMaxTries;) {
    const auto count = static_cast<int>(request.num_parts);
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t done = reading ? preadv(request.fd, request.parts.data(), count, offset)
                                 : pwritev(request.fd, request.parts.data(), count, offset);
    if (done < 0 && errno != EINTR && errno != EAGAIN) return errno;
    if (done == 0) return reading ? ENODATA : EIO;
    if (done > 0 && static_cast<std::size_t>(done) >= request.length()) return 0;
    const std::size_t moved = done < 0 ? 0 : static_cast<std::size_t>(done) / 4096 * 4096;
    tries = moved == 0 ? tries + 1 : 0;
    advance(request, moved);
  }
  return reading ? ENODATA : EIO;
}

}  // namespace

bool Drive::carry(const std::shared_ptr<Job>& job, std::size_t piece, const IoRequest& request) {
  const std::size_t length = request.length();
  if (length > inline_bytes_ || request.kind == IoKind::kSync) return false;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->stopping || state_->carrying >= depth_) return false;
    ++state_->carrying;
    ++state_->stats.in_flight;
    state_->stats.in_flight_bytes += length;
  }
  const int code = carry_out(request);
  bool wake = false;
  {
    const std::lock_guard lock(state_->mutex);
    --state_->carrying;
    --state_->stats.in_flight;
    state_->stats.in_flight_bytes -= length;
    ++state_->stats.inline_requests;
    state_->stats.inline_bytes += length;
    if (code != 0) ++state_->stats.errors;
    wake = state_->stopping;  // the thread ends once nothing is in flight
    state_->idle.notify_all();
  }
  if (wake) state_->engine->wake();
  job->finish(piece, code);
  return true;
}

}  // namespace tiercache
