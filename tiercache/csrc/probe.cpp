// prove_engine(): an engine counts as working only after bytes went through it.
#include <cstdlib>
#include <cstring>

#include "engine.hpp"
#include "record.hpp"

namespace tiercache {
namespace {

struct Free {
  void operator()(void* data) const { std::free(data); }
};

std::string carry(IoEngine& engine, const IoRequest& request) {
  if (!engine.submit(request)) return "queue full when empty";
  std::vector<IoDone> done;
  for (int tries = 0; done.empty() && tries < 50; ++tries) engine.wait(done, 200);
  if (done.empty()) return "no completion in 10 s";
  if (done.size() != 1 || done[0].id != request.id) return "completion of another request";
  if (done[0].result < 0) return std::strerror(static_cast<int>(-done[0].result));
  if (request.kind != IoKind::kSync && done[0].result != static_cast<std::int64_t>(request.length()))
    return "short";
  return {};
}

}  // namespace

std::string prove_engine(IoEngine& engine, int fd, std::uint64_t offset, std::size_t size) {
  const std::unique_ptr<std::uint8_t, Free> memory(
      static_cast<std::uint8_t*>(std::aligned_alloc(kBlock, 2 * size)));
  if (!memory) return "no memory";
  std::uint8_t* const out = memory.get();
  std::uint8_t* const back = out + size;
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<std::uint8_t>(i * 131 + i / 251);
  std::memset(back, 0, size);
  IoRequest request;
  request.id = 11;
  request.kind = IoKind::kWrite;
  request.fd = fd;
  request.offset = offset;
  request.parts[0] = {out, size};
  request.num_parts = 1;
  if (auto reason = carry(engine, request); !reason.empty()) return "write: " + reason;
  request.id = 12;
  request.kind = IoKind::kRead;
  request.parts[0] = {back, size / 2};
  request.parts[1] = {back + size / 2, size - size / 2};
  request.num_parts = 2;
  if (auto reason = carry(engine, request); !reason.empty()) return "read: " + reason;
  if (std::memcmp(out, back, size) != 0) return "other bytes came back";
  request.id = 13;
  request.kind = IoKind::kSync;
  request.num_parts = 0;
  if (auto reason = carry(engine, request); !reason.empty()) return "sync: " + reason;
  return {};
}

}  // namespace tiercache
