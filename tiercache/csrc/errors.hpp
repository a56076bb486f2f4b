// Errors of the core. One type; the bindings turn its kind into the class of tiercache/errors.py.
#pragma once
#include <cstring>
#include <exception>
#include <string>
#include <utility>

namespace tiercache {

enum class ErrorKind { kConfig, kClosed, kLocked, kForked, kTimeout, kMissing, kState, kCorrupt, kFull, kIo };

class Error : public std::exception {
 public:
  Error(ErrorKind kind_, std::string text_, std::string got_ = {}, std::string limit_ = {},
        std::string remedy_ = {}, int code_ = 0)
      : kind(kind_),
        text(std::move(text_)),
        got(std::move(got_)),
        limit(std::move(limit_)),
        remedy(std::move(remedy_)),
        code(code_) {}

  const char* what() const noexcept override { return text.c_str(); }

  ErrorKind kind;
  std::string text, got, limit, remedy;
  int code;  // errno of the operating system, 0 where there is none
};

inline Error io_error(const std::string& what, int code, std::string remedy = {}) {
  return Error(ErrorKind::kIo, what, std::strerror(code), {}, std::move(remedy), code);
}

}  // namespace tiercache
