// libFuzzer target of every native decoder: whatever the payload, an exception or a page, never a bad access.
// The first four bytes choose the decoder, the path and the page's shape; the rest is the payload. Payload
// and page lie in blocks of exactly their size, so that the address sanitizer sees the first byte beyond
// either.
#include <cstdint>
#include <cstring>
#include <memory>

#include "codec_emulate.hpp"
#include "codec_exponent.hpp"
#include "codec_planes.hpp"
#include "codec_quant_host.hpp"
#include "codec_window_host.hpp"

using namespace tiercache::codec;

namespace {

// A table out of the payload's first bytes, or one that training makes where they are none.
ExponentTable make_table(const std::uint8_t* data, std::size_t size, Prediction prediction) {
  Counts counts{};
  if (size >= 40)
    for (std::size_t i = 0; i < 40; ++i) counts[(data[0] + i) & 255] = data[i];
  else
    for (std::size_t i = 0; i < 40; ++i) counts[110 + i] = std::uint64_t{1} << (i < 20 ? i : 40 - i);
  return ExponentTable::train(prediction, counts);
}

void decode(unsigned decoder, Isa isa, int threads, const std::uint8_t* body, std::size_t size,
            std::size_t rows, std::size_t cols) {
  const std::size_t n = rows * cols;
  const std::unique_ptr<std::uint8_t[]> page(new std::uint8_t[4 * n + 1]);
  auto* words = reinterpret_cast<std::uint16_t*>(page.get());
  const QuantShape shape{1, rows, cols, decoder % 2 == 0 ? Axis::tokens : Axis::channels};
  switch (decoder % 8) {
    case 0:
    case 1:
      exponent_decode(body, size, words, n, (cols + 63) / 64 * 64,
                      make_table(body, size, static_cast<Prediction>(decoder / 8 % 4)), isa, threads);
      break;
    case 2:
      window_decode(body, size, words, n, isa, threads);
      break;
    case 3:
      planes_decode(body, size, page.get(), n, decoder / 8 % 2 == 0 ? 2 : 4);
      break;
    case 4:
    case 5:
      quant_decode(body, size, page.get(), shape, static_cast<QuantFormat>(decoder / 8 % 3),
                   static_cast<QuantElement>(decoder / 24 % 3), isa, threads);
      break;
    case 6:
      emulate_window_decode(body, size, words, n);
      break;
    default:
      emulate_quant_decode(body, size, page.get(), shape, static_cast<QuantFormat>(decoder / 8 % 3),
                           static_cast<QuantElement>(decoder / 24 % 3));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  const auto isa = static_cast<Isa>(data[1] % 3);
  if (!isa_available(isa)) return 0;
  const std::unique_ptr<std::uint8_t[]> body(new std::uint8_t[size - 4]);
  std::memcpy(body.get(), data + 4, size - 4);
  try {
    decode(data[0], isa, 1 + data[1] / 3 % 2, body.get(), size - 4, data[2], data[3]);
  } catch (const Malformed&) {
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
