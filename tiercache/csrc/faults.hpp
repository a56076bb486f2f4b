// Engines around engines: one that fails on purpose, one that writes down all it does. Product code: the
// tests of every layer above use them, and so can a user who doubts a drive.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine.hpp"

namespace tiercache {

enum class FaultAction : std::uint8_t {
  kError,    // completes with -code, nothing reaches the file
  kShort,    // says `bytes`, and carries out the whole blocks of them
  kLate,     // the completion comes `delay_ms` after the work
  kReorder,  // completions are held until `hold` of them are there, then given in reverse
};

struct FaultRule {
  IoKind kind = IoKind::kRead;
  FaultAction action = FaultAction::kError;
  int code = 5;                 // EIO
  std::uint64_t skip = 0;       // let this many matching operations pass first
  std::uint64_t times = ~0ull;  // then act on this many
  std::uint64_t bytes = 0;
  unsigned delay_ms = 0, hold = 0;
  std::int64_t segment = -1;  // only this one; -1: all
};

// The rules in force; shared by the engines of all drives and changed from any thread.
class Faults {
 public:
  void add(const FaultRule& rule);
  void clear();
  std::uint64_t hits() const;
  // The first rule that acts on this request, counted as used.
  bool match(const IoRequest& request, FaultRule& found);

 private:
  mutable std::mutex mutex_;
  std::vector<FaultRule> rules_;
  std::uint64_t hits_ = 0;
};

struct LogEvent {
  std::string what;  // "write", "done", "sync", "synced", or a mark of the owner
  std::uint64_t id = 0;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::string bytes;
};

// Everything that was asked of the drives, in order, with the bytes.
class WriteLog {
 public:
  void add(LogEvent event);
  std::vector<LogEvent> take();

 private:
  std::mutex mutex_;
  std::vector<LogEvent> events_;
};

std::unique_ptr<IoEngine> make_fault_engine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Faults> faults);
std::unique_ptr<IoEngine> make_log_engine(std::unique_ptr<IoEngine> inner, std::shared_ptr<WriteLog> log);

}  // namespace tiercache
