// What a path of the window codec implements, over the groups begin..end-1 in order.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_window.hpp"

namespace tiercache::codec {

struct WindowKernels {
  // Writes the groups' bytes, bases and planes; their escapes go to `escapes`, which has `room` bytes and
  // 64 more. Returns the number of escapes, or room + 1 when they don't fit.
  std::size_t (*encode)(const std::uint16_t* x, std::uint8_t* body, WindowLayout at, std::size_t begin,
                        std::size_t end, std::uint8_t* escapes, std::size_t room);
  // Decodes the groups, whose escapes are the `num_escapes` at `escapes`; false unless they match.
  bool (*decode)(const std::uint8_t* body, WindowLayout at, std::size_t begin, std::size_t end,
                 const std::uint8_t* escapes, std::size_t num_escapes, std::uint16_t* x);
};

extern const WindowKernels kWindowPortable;
#if defined(__x86_64__)
extern const WindowKernels kWindowAvx2;
extern const WindowKernels kWindowAvx512;
#endif

}  // namespace tiercache::codec
