// Conversions between the floating-point formats of pages and fp32, by integer operations alone, so that host
// and device and every instruction set agree. All round to nearest, ties to even.
#pragma once
#include "codec_device.hpp"

namespace tiercache::codec {

// Rounds |value| < 2^22 to an integer, ties to even.
TC_HD float round_even(float value) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
#if defined(__CUDA_ARCH__)
  return __fsub_rn(__fadd_rn(value, kMagic), kMagic);
#else
  return (value + kMagic) - kMagic;
#endif
}

TC_HD float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

TC_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

TC_HD float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Finite values only.
TC_HD u16 float_to_bf16(float value) {
  const u32 bits = float_bits(value);
  return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

TC_HD float bf16_to_float(u16 word) { return bits_float(static_cast<u32>(word) << 16); }

// The smallest bf16 that is not below a value >= 0.
TC_HD u16 bf16_above(float value) { return static_cast<u16>((float_bits(value) + 0xFFFFu) >> 16); }

TC_HD float half_to_float(u16 word) {
  const u32 sign = static_cast<u32>(word & 0x8000u) << 16;
  const u32 magnitude = word & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  if (magnitude < 0x400u) {
    const float small = multiply(static_cast<float>(magnitude), 5.9604644775390625e-8f);  // 2^-24
    return bits_float(float_bits(small) | sign);
  }
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}

// Finite values only; those beyond the range become the largest half.
TC_HD u16 float_to_half(float value) {
  const u32 bits = float_bits(value);
  const u32 sign = bits >> 16 & 0x8000u;
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x477FE000u) return static_cast<u16>(sign | 0x7BFFu);
  if (magnitude < 0x38800000u) {
    const float steps = round_even(multiply(bits_float(magnitude), 16777216.0f));  // 2^24
    return static_cast<u16>(sign | static_cast<u32>(steps));
  }
  const u32 rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23);
  const u32 half = rounded >> 13;
  return static_cast<u16>(sign | (half > 0x7BFFu ? 0x7BFFu : half));
}

// |value| <= 448.
TC_HD u8 float_to_e4m3(float value) {
  const u32 bits = float_bits(value);
  const u32 magnitude = bits & 0x7FFFFFFFu;
  const u32 small =
      static_cast<u32>(round_even(multiply(bits_float(magnitude < 0x3C800000u ? magnitude : 0u), 512.0f)));
  const u32 normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  const u32 code = magnitude < 0x3C800000u ? small : normal;
  return static_cast<u8>((bits >> 24 & 0x80u) | (code > 0x7Eu ? 0x7Eu : code));
}

TC_HD float e4m3_to_float(u8 code) {
  const u32 magnitude = code & 0x7Fu;
  const u32 small =
      float_bits(multiply(static_cast<float>(static_cast<i32>(magnitude)), 0.001953125f));  // 2^-9
  const u32 normal = (magnitude << 20) + (120u << 23);
  return bits_float((magnitude < 8u ? small : normal) | static_cast<u32>(code & 0x80u) << 24);
}

// The elements a page may have. `exact` is the word as it is.
struct Bf16 {
  using Word = u16;
  TC_HD static float to_float(Word word) { return bf16_to_float(word); }
  TC_HD static Word from_float(float value) { return float_to_bf16(value); }
};
struct Half {
  using Word = u16;
  TC_HD static float to_float(Word word) { return half_to_float(word); }
  TC_HD static Word from_float(float value) { return float_to_half(value); }
};
struct Single {
  using Word = u32;
  TC_HD static float to_float(Word word) { return bits_float(word); }
  TC_HD static Word from_float(float value) { return float_bits(value); }
};

}  // namespace tiercache::codec
