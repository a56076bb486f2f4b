// Drive::State, for the files that implement Drive.
#pragma once
#include "drive.hpp"

namespace tiercache {

// Drops the first `bytes` of the request.
void advance(IoRequest& request, std::size_t bytes);

// Shared by the drive and its thread, so that an abandoned thread still owns what it uses.
struct Drive::State {
  State(std::unique_ptr<IoEngine> made, unsigned depth) : engine(std::move(made)), pieces(depth) {
    for (unsigned i = depth; i > 0; --i) free_slots.push_back(i - 1);
  }

  bool pop(Piece& next);                           // under the mutex
  void start(std::unique_lock<std::mutex>& lock);  // moves queued pieces to the engine
  void complete(const std::vector<IoDone>& done);
  void finish(std::size_t slot, int code);
  bool offer_slot(std::size_t slot);

  mutable std::mutex mutex;
  std::condition_variable idle;
  std::deque<Piece> reads, writes;
  bool stopping = false, sleeping = false;
  std::size_t carrying = 0;  // callers in carry()
  DriveStats stats;

  // Of the thread alone.
  std::unique_ptr<IoEngine> engine;
  std::vector<Piece> pieces;                     // by slot; the engine points into them
  std::vector<std::size_t> free_slots, waiting;  // waiting: hold a slot, to be offered (again)
  std::uint64_t generation = 0, turns = 0;
};

}  // namespace tiercache
