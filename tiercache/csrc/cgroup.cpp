// available_memory(): the limits of every cgroup above this process.
#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "memory.hpp"

namespace tiercache {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// The number in a file; "max" and v1's huge default both mean no limit.
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  if (word == "max") return kUnlimited;
  try {
    return std::stoull(word);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// File pages that the kernel drops when the group needs memory; they count as its usage until then.
std::uint64_t reclaimable(const std::string& group) {
  std::ifstream file(group + "/memory.stat");
  std::string name;
  std::uint64_t value = 0, own = 0;
  while (file >> name >> value) {
    if (name == "total_inactive_file") return value;  // v1: with the groups below
    if (name == "inactive_file") own = value;
  }
  return own;
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
  std::ifstream file(root + "proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "MemAvailable:") return kibibytes * 1024;
  }
  return kUnlimited;
}

}  // namespace

std::uint64_t available_memory(const std::string& root) {
  std::uint64_t smallest = mem_available(root);
  std::ifstream groups(root + "proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
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
