#include "codec_quant_host.hpp"

#include <algorithm>
#include <atomic>

#include "codec_parallel.hpp"
#include "codec_quant_kernels.hpp"

namespace tiercache::codec {
namespace {

constexpr std::size_t kChunk = 4096;  // groups

const QuantKernels& kernels(QuantFormat format, QuantElement element, Isa isa) {
  if (!isa_available(isa)) throw std::invalid_argument("this processor has not the instructions asked for");
  const auto f = static_cast<std::size_t>(format);
  const auto e = static_cast<std::size_t>(element);
  if (f > 2 || e > 2) throw std::invalid_argument("unknown format or element of a lossy codec");
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kQuantAvx512[f][e];
  if (isa == Isa::avx2) return kQuantAvx2[f][e];
#endif
  return kQuantPortable[f][e];
}

struct Sizes {
  std::size_t scale;
  std::size_t fixed;
  std::size_t exception;
};

Sizes sizes(QuantShape s, QuantFormat format, QuantElement element) {
  const std::size_t exception =
      element == QuantElement::single ? quant_exception_bytes<Single>() : quant_exception_bytes<Bf16>();
  if (format == QuantFormat::int4) return {Int4::kScaleBytes, quant_fixed_bytes<Int4>(s), exception};
  return {Int8::kScaleBytes, quant_fixed_bytes<Int8>(s), exception};
}

using WriteException = void (*)(const void* x, QuantShape s, u64 group, u64 rank, std::uint8_t* body);

template <class Format, class Element>
void write_exception(const void* x, QuantShape s, u64 group, u64 rank, std::uint8_t* body) {
  quant_write_exception<Format, Element>(static_cast<const typename Element::Word*>(x), s, group, rank, body);
}

// e4m3 and int8 have the same layout.
WriteException exception_writer(QuantFormat format, QuantElement element) {
  const bool pairs = format == QuantFormat::int4;
  if (element == QuantElement::single)
    return pairs ? write_exception<Int4, Single> : write_exception<Int8, Single>;
  return pairs ? write_exception<Int4, Bf16> : write_exception<Int8, Bf16>;
}

}  // namespace

QuantResult quant_encode(const void* x, QuantShape s, QuantFormat format, QuantElement element,
                         std::uint64_t seed, std::uint8_t* out, std::size_t room, Isa isa, int threads) {
  const QuantKernels& k = kernels(format, element, isa);
  const Sizes size = sizes(s, format, element);
  const std::size_t groups = s.groups();
  if (size.fixed > room || groups > 0xFFFFFFFFu) return {0, 0};
  std::atomic<std::size_t> exceptions{0};
  for_each((groups + kChunk - 1) / kChunk, threads, [&](std::size_t c) {
    exceptions += k.encode(x, s, seed, c * kChunk, std::min(groups, (c + 1) * kChunk), out);
  });
  if (exceptions > (room - size.fixed) / size.exception) return {0, exceptions};
  const WriteException write = exception_writer(format, element);
  std::size_t rank = 0;
  for (std::size_t g = 0; g < groups && rank < exceptions; ++g)
    if (is_exception(out, static_cast<int>(size.scale), g)) write(x, s, g, rank++, out);
  return {size.fixed + exceptions * size.exception, exceptions};
}

void quant_decode(const std::uint8_t* body, std::size_t bytes, void* x, QuantShape s, QuantFormat format,
                  QuantElement element, Isa isa, int threads) {
  const QuantKernels& k = kernels(format, element, isa);
  const Sizes size = sizes(s, format, element);
  if (bytes < size.fixed || (bytes - size.fixed) % size.exception != 0)
    throw Malformed("lossy payload: its size fits no page of this shape");
  const std::size_t exceptions = (bytes - size.fixed) / size.exception;
  const std::size_t groups = s.groups();
  for_each((groups + kChunk - 1) / kChunk, threads, [&](std::size_t c) {
    if (!k.decode(body, s, exceptions, c * kChunk, std::min(groups, (c + 1) * kChunk), x))
      throw Malformed("lossy payload: a group that is kept exact is missing");
  });
}

}  // namespace tiercache::codec
