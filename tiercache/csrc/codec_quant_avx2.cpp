#if defined(__x86_64__)
#include <cstring>

#include "codec_quant_kernels.hpp"

#define TC_PATH quant_avx2
#define TC_TARGET [[gnu::target("avx2,bmi,bmi2")]]
#include "codec_quant_scalar.hpp"

namespace tiercache::codec {

const QuantTable kQuantAvx2 = TC_QUANT_TABLE;

}  // namespace tiercache::codec
#endif
