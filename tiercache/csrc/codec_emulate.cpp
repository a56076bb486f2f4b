#include "codec_emulate.hpp"

#include <stdexcept>
#include <vector>

#include "codec_steps.hpp"

namespace tiercache::codec {
namespace {

void scan(std::uint8_t* counts, u64 n, u64 fixed, u64 unit, u64* length) {
  std::vector<u64> partial(kScanThreads);
  for (int t = 0; t < kScanThreads; ++t) scan_share(counts, n, t, partial.data());
  scan_partials(partial.data(), fixed, unit, length);
  for (int t = 0; t < kScanThreads; ++t) scan_write(counts, n, t, partial.data());
}

template <class Format, class Element>
u64 quant_encode_all(const void* page, QuantShape s, u64 seed, std::uint8_t* body, u64 room) {
  const auto* x = static_cast<const typename Element::Word*>(page);
  const u64 groups = s.groups();
  const u64 supers = (groups + kSuper - 1) / kSuper;
  if (quant_fixed_bytes<Format>(s) > room) return quant_fixed_bytes<Format>(s);
  std::vector<std::uint8_t> counts(4 * supers);
  u64 length = 0;
  for (u64 g = 0; g < groups; ++g) quant_encode_group<Format, Element>(x, s, g, seed, body);
  for (u64 i = 0; i < supers; ++i) quant_count(body, Format::kScaleBytes, groups, i, counts.data());
  scan(counts.data(), supers, quant_fixed_bytes<Format>(s), quant_exception_bytes<Element>(), &length);
  for (u64 g = 0; g < groups; ++g) quant_finish<Format, Element>(x, s, body, room, length, counts.data(), g);
  return length;
}

template <class Format, class Element>
bool quant_decode_all(const std::uint8_t* body, u64 length, void* page, QuantShape s) {
  u32 bad = 0;
  for (u64 g = 0; g <= s.groups(); ++g)
    quant_decode_step<Format, Element>(body, length, s, static_cast<typename Element::Word*>(page), g, &bad);
  return bad == 0;
}

// Calls run<Format, Element>() for the format and element of a page.
template <class Run>
auto dispatch(QuantFormat format, QuantElement element, const Run& run) {
  const auto with = [&]<class Format>() {
    if (element == QuantElement::bf16) return run.template operator()<Format, Bf16>();
    if (element == QuantElement::half) return run.template operator()<Format, Half>();
    return run.template operator()<Format, Single>();
  };
  if (format == QuantFormat::e4m3) return with.template operator()<E4m3>();
  if (format == QuantFormat::int8) return with.template operator()<Int8>();
  return with.template operator()<Int4>();
}

}  // namespace

std::uint64_t emulate_window_encode(const std::uint16_t* x, std::size_t n, std::uint8_t* out,
                                    std::size_t room) {
  const WindowLayout at{n / kGroup};
  const u64 tail = 2 * (n % kGroup);
  if (at.escapes() + tail > room) return at.escapes() + tail;
  u64 length = 0;
  for (u64 g = 0; g < at.groups; ++g) window_encode_group(x, out, at, g);
  for (u64 i = 0; i < at.supers(); ++i) window_count(out, at, i);
  scan(out + at.first_escape(), at.supers(), at.escapes() + tail, 1, &length);
  for (u64 t = 0; t <= at.groups; ++t) window_finish(x, n, out, room, length, t);
  return length;
}

bool emulate_window_decode(const std::uint8_t* body, std::uint64_t length, std::uint16_t* x, std::size_t n) {
  u32 bad = 0;
  for (u64 t = 0; t <= n / kGroup; ++t) window_decode_step(body, length, n, x, t, &bad);
  return bad == 0;
}

std::uint64_t emulate_quant_encode(const void* x, QuantShape shape, QuantFormat format, QuantElement element,
                                   std::uint64_t seed, std::uint8_t* out, std::size_t room) {
  return dispatch(format, element, [&]<class Format, class Element>() {
    return quant_encode_all<Format, Element>(x, shape, seed, out, room);
  });
}

bool emulate_quant_decode(const std::uint8_t* body, std::uint64_t length, void* x, QuantShape shape,
                          QuantFormat format, QuantElement element) {
  return dispatch(format, element, [&]<class Format, class Element>() {
    return quant_decode_all<Format, Element>(body, length, x, shape);
  });
}

}  // namespace tiercache::codec
