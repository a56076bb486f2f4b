#include "codec_planes.hpp"

#include "codec_base.hpp"

namespace tiercache::codec {
namespace {

constexpr std::size_t kChunk = 4096;

template <class Word>
std::uint8_t constant_mask(const std::uint8_t* data, std::size_t count) {
  const Word first = load<Word>(data);
  Word differ = 0;
  constexpr Word kAll = static_cast<Word>(~Word{0});
  for (std::size_t i = 0; i < count;) {
    const std::size_t end = count - i < kChunk ? count : i + kChunk;
    for (; i < end; ++i) differ = static_cast<Word>(differ | (load<Word>(data + i * sizeof(Word)) ^ first));
    bool varied = true;
    for (std::size_t b = 0; b < sizeof(Word); ++b)
      varied = varied && (differ & static_cast<Word>(Word{0xFF} << (8 * b))) != 0;
    if (differ == kAll || varied) return 0;
  }
  std::uint8_t mask = 0;
  for (std::size_t b = 0; b < sizeof(Word); ++b)
    if ((differ & static_cast<Word>(Word{0xFF} << (8 * b))) == 0) mask |= static_cast<std::uint8_t>(1u << b);
  return mask;
}

// Byte offsets of the planes that vary.
struct Varying {
  std::size_t at[8];
  std::size_t count = 0;

  Varying(std::uint8_t mask, std::size_t width) {
    for (std::size_t b = 0; b < width; ++b)
      if ((mask >> b & 1u) == 0) at[count++] = b;
  }
};

// How many bytes a body of this mask has after it.
std::size_t body_bytes(const Varying& varying, std::size_t count, std::size_t width) {
  return width - varying.count + varying.count * count;
}

}  // namespace

std::uint8_t constant_planes(const std::uint8_t* data, std::size_t count, std::size_t width) {
  if (count == 0) return 0;
  switch (width) {
    case 1:
      return constant_mask<std::uint8_t>(data, count);
    case 2:
      return constant_mask<std::uint16_t>(data, count);
    case 4:
      return constant_mask<std::uint32_t>(data, count);
    case 8:
      return constant_mask<std::uint64_t>(data, count);
    default:
      throw std::invalid_argument("elements have 1, 2, 4 or 8 bytes");
  }
}

std::size_t planes_encode(const std::uint8_t* data, std::size_t count, std::size_t width, std::uint8_t* out) {
  const std::uint8_t mask = constant_planes(data, count, width);
  const Varying varying(mask, width);
  std::uint8_t* to = out;
  *to++ = mask;
  for (std::size_t b = 0; b < width; ++b)
    if ((mask >> b & 1u) != 0) *to++ = data[b];
  if (mask == 0) {
    if (count != 0) std::memcpy(to, data, count * width);
    return 1 + count * width;
  }
  for (std::size_t p = 0; p < varying.count; ++p)
    for (std::size_t i = 0; i < count; ++i) to[i * varying.count + p] = data[i * width + varying.at[p]];
  return 1 + body_bytes(varying, count, width);
}

void planes_decode(const std::uint8_t* body, std::size_t size, std::uint8_t* data, std::size_t count,
                   std::size_t width) {
  if (size == 0) throw Malformed("constant planes: an empty payload");
  const std::uint8_t mask = body[0];
  if ((mask >> width) != 0) throw Malformed("constant planes: a mask of more planes than there are");
  if (mask != 0 && count == 0) throw Malformed("constant planes: constants of no elements");
  const Varying varying(mask, width);
  if (size - 1 != body_bytes(varying, count, width)) throw Malformed("constant planes: the wrong size");
  const std::uint8_t* from = body + 1;
  if (mask == 0) {
    if (count != 0) std::memcpy(data, from, count * width);
    return;
  }
  for (std::size_t b = 0; b < width; ++b) {
    if ((mask >> b & 1u) == 0) continue;
    const std::uint8_t value = *from++;
    for (std::size_t i = 0; i < count; ++i) data[i * width + b] = value;
  }
  for (std::size_t p = 0; p < varying.count; ++p)
    for (std::size_t i = 0; i < count; ++i) data[i * width + varying.at[p]] = from[i * varying.count + p];
}

}  // namespace tiercache::codec
