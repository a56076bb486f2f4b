// Disk::open_drive: the highest rung that works.
#include "disk.hpp"
#include "errors.hpp"

namespace tiercache {
namespace {

// Longest request that its caller carries out itself.
constexpr std::size_t kInlineBytes = (512 << 10) + 2 * kBlock;

}  // namespace

// Climbs down from io_uring with O_DIRECT to the first rung that carries bytes there and back.
void Disk::open_drive(std::uint32_t drive) {
  constexpr std::uint64_t kProbe = 64 << 10;
  std::string why;
  Fd probe;
  if (segments_.direct(drive)) {
    probe = segments_.scratch_file(drive, kProbe, true);
    std::string reason = probe ? std::string() : "open: Invalid argument";
    if (probe) reason = prove_engine(*make_thread_engine(1, 4), probe.get(), 0, kProbe);
    if (!reason.empty()) {
      segments_.set_buffered(drive);
      why += "; no O_DIRECT: " + reason;
    }
  }
  if (!segments_.direct(drive)) probe = segments_.scratch_file(drive, kProbe, false);
  std::unique_ptr<IoEngine> engine;
  if (options_.engine != "threads") {
    std::string reason;
    engine = make_uring_engine(options_.depth, reason);
    if (engine) reason = prove_engine(*engine, probe.get(), 0, kProbe);
    if (!reason.empty()) {
      engine.reset();
      why += "; no io_uring: " + reason;
      if (options_.engine == "io_uring")
        throw Error(ErrorKind::kConfig, "disk tier: engine io_uring", reason);
    }
  }
  if (!engine) {
    engine = make_thread_engine(options_.threads, options_.depth);
    const std::string reason = prove_engine(*engine, probe.get(), 0, kProbe);
    if (!reason.empty())
      throw Error(ErrorKind::kIo, "disk tier: no way to write to this drive", reason, {}, {}, 5);
  }
  rungs_.push_back(engine->name() + (segments_.direct(drive) ? "+direct" : "+buffered") + why);
  if (options_.faults) engine = make_fault_engine(std::move(engine), options_.faults);
  if (options_.log) engine = make_log_engine(std::move(engine), options_.log);
  // Injected faults and the log see every request, so then none may pass the engine by.
  const std::size_t inline_bytes = options_.faults || options_.log ? 0 : kInlineBytes;
  drives_.push_back(std::make_unique<Drive>(std::move(engine), options_.depth, inline_bytes));
}

}  // namespace tiercache
