// available_memory(): the limits of every cgroup above this process.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "memory.hpp"

namespace tiercache {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// A whole small file; nullopt when it cannot be read. C's own functions, not streams: a stream's number
// parsing needs locale facets, which do not match where a process has loaded two C++ libraries (seen with one
// build of torch).
std::optional<std::string> read_text(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return std::nullopt;
  std::string text;
  char buffer[4096];
  while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, file)) text.append(buffer, count);
  std::fclose(file);
  return text;
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return value;
}

// The number in a file; "max" and v1's huge default both mean no limit.
std::optional<std::uint64_t> read_number(const std::string& path) {
  const auto text = read_text(path);
  if (!text) return std::nullopt;
  if (text->starts_with("max")) return kUnlimited;
  return parse_number(*text);
}

// The number behind `name` at the beginning of a line.
std::optional<std::uint64_t> number_of(const std::string& text, std::string_view name) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line(text.data() + at, end - at);
    if (line.starts_with(name)) return parse_number(line.substr(name.size()));
    at = end + 1;
  }
  return std::nullopt;
}

// File pages that the kernel drops when the group needs memory; they count as its usage until then.
std::uint64_t reclaimable(const std::string& group) {
  const auto text = read_text(group + "/memory.stat");
  if (!text) return 0;
  const auto all = number_of(*text, "total_inactive_file ");  // v1: with the groups below
  return all ? *all : number_of(*text, "inactive_file ").value_or(0);
}

std::uint64_t headroom(const std::string& group, const char* limit_name, const char* usage_name) {
  const auto limit = read_number(group + "/" + limit_name);
  // A limit of 0 cannot be meant: a process runs under it.
  if (!limit || *limit == 0 || *limit >= (1ull << 60)) return kUnlimited;
  const std::uint64_t usage = read_number(group + "/" + usage_name).value_or(0);
  const std::uint64_t held = usage - std::min(usage, reclaimable(group));
  return *limit > held ? *limit - held : 0;
}

// Walks from the process's own group to the root of the hierarchy.
std::uint64_t headroom_of_ancestors(const std::string& mount, std::string path, const char* limit,
                                    const char* usage) {
  std::uint64_t smallest = kUnlimited;
  while (true) {
    smallest = std::min(smallest, headroom(mount + path, limit, usage));
    const auto slash = path.find_last_of('/');
    if (path.empty() || slash == std::string::npos) return smallest;
    path.resize(slash);
  }
}

std::uint64_t mem_available(const std::string& root) {
  const auto text = read_text(root + "proc/meminfo");
  const auto kibibytes = text ? number_of(*text, "MemAvailable:") : std::nullopt;
  return kibibytes ? *kibibytes * 1024 : kUnlimited;
}

}  // namespace

std::uint64_t available_memory(const std::string& root) {
  std::uint64_t smallest = mem_available(root);
  const std::string groups = read_text(root + "proc/self/cgroup").value_or("");
  for (std::size_t at = 0; at < groups.size();) {
    const std::size_t end = std::min(groups.find('\n', at), groups.size());
    const std::string line = groups.substr(at, end - at);
    at = end + 1;
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      for (const char* mount : {"sys/fs/cgroup", "sys/fs/cgroup/unified"}) {
        smallest =
            std::min(smallest, headroom_of_ancestors(root + mount, path, "memory.max", "memory.current"));
      }
    } else if (controllers.find(",memory,") != std::string::npos) {
      smallest = std::min(smallest, headroom_of_ancestors(root + "sys/fs/cgroup/memory", path,
                                                          "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
  }
  return smallest;
}

}  // namespace tiercache
