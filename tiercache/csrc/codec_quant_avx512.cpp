#if defined(__x86_64__)
#include <cstring>

#include "codec_quant_kernels.hpp"

#define TC_PATH quant_avx512
#define TC_TARGET [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2")]]
#include "codec_quant_scalar.hpp"

namespace tiercache::codec {

const QuantTable kQuantAvx512 = TC_QUANT_TABLE;

}  // namespace tiercache::codec
#endif
