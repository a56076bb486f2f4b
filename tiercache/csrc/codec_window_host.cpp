#include "codec_window_host.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec_parallel.hpp"
#include "codec_window_kernels.hpp"

namespace tiercache::codec {
namespace {

// Groups that are worked on at once: 128 KiB of elements.
constexpr std::size_t kChunk = 16 * kSuper;

const WindowKernels& kernels(Isa isa) {
  if (!isa_available(isa)) throw std::invalid_argument("this processor has not the instructions asked for");
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kWindowAvx512;
  if (isa == Isa::avx2) return kWindowAvx2;
#endif
  return kWindowPortable;
}

std::size_t chunks(const WindowLayout& at) { return (at.groups + kChunk - 1) / kChunk; }

std::size_t count_escapes(const std::uint8_t* body, WindowLayout at, std::size_t super) {
  const std::size_t end = std::min<std::size_t>((super + 1) * kSuper, at.groups);
  std::size_t count = 0;
  for (std::size_t g = super * kSuper; g < end; ++g)
    count += static_cast<std::size_t>(popcount(window_escaped(body, at, g)));
  return count;
}

}  // namespace

std::size_t window_bound(std::size_t n) {
  const WindowLayout at{n / kGroup};
  return at.escapes() + at.groups * kGroup + 2 * (n % kGroup);
}

std::size_t window_encode(const std::uint16_t* x, std::size_t n, std::uint8_t* out, std::size_t room, Isa isa,
                          int threads) {
  const WindowKernels& k = kernels(isa);
  const WindowLayout at{n / kGroup};
  const std::size_t tail = 2 * (n % kGroup);
  if (at.escapes() + tail > room) return 0;
  const std::size_t escape_room = room - at.escapes() - tail;
  std::vector<std::vector<std::uint8_t>> escapes(chunks(at));
  for_each(chunks(at), threads, [&](std::size_t c) {
    const std::size_t begin = c * kChunk;
    const std::size_t end = std::min<std::size_t>(begin + kChunk, at.groups);
    thread_local std::vector<std::uint8_t> mine(kChunk * kGroup + kGroup);
    const std::size_t count = k.encode(x, out, at, begin, end, mine.data(), kChunk * kGroup);
    escapes[c].assign(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(count));
  });
  std::size_t total = 0;
  for (std::size_t c = 0; c < escapes.size(); ++c) {
    if (escapes[c].size() > escape_room - total || total > 0xFFFF0000u) return 0;  // counted in 32 bits
    std::size_t first = total;
    const std::size_t last = std::min<std::size_t>((c + 1) * kChunk / kSuper, at.supers());
    for (std::size_t s = c * kChunk / kSuper; s < last; ++s) {
      store(out + at.first_escape() + 4 * s, static_cast<std::uint32_t>(first));
      first += count_escapes(out, at, s);
    }
    if (!escapes[c].empty()) std::memcpy(out + at.escapes() + total, escapes[c].data(), escapes[c].size());
    total += escapes[c].size();
  }
  std::memcpy(out + at.escapes() + total, x + at.groups * kGroup, tail);
  return at.escapes() + total + tail;
}

void window_decode(const std::uint8_t* body, std::size_t size, std::uint16_t* x, std::size_t n, Isa isa,
                   int threads) {
  const WindowKernels& k = kernels(isa);
  const WindowLayout at{n / kGroup};
  const std::size_t tail = 2 * (n % kGroup);
  if (size < at.escapes() + tail) throw Malformed("window payload: too short for its elements");
  const std::size_t num_escapes = size - at.escapes() - tail;
  const auto first = [&](std::size_t chunk) -> std::size_t {
    const std::size_t super = chunk * kChunk / kSuper;
    if (super >= at.supers()) return num_escapes;
    return load<std::uint32_t>(body + at.first_escape() + 4 * super);
  };
  for_each(chunks(at), threads, [&](std::size_t c) {
    const std::size_t begin = first(c);
    const std::size_t end = first(c + 1);
    if (begin > end || end > num_escapes) throw Malformed("window payload: escapes out of order");
    const std::size_t last = std::min<std::size_t>((c + 1) * kChunk, at.groups);
    if (!k.decode(body, at, c * kChunk, last, body + at.escapes() + begin, end - begin, x))
      throw Malformed("window payload: the escapes don't match the planes");
  });
  std::memcpy(x + at.groups * kGroup, body + size - tail, tail);
}

}  // namespace tiercache::codec
