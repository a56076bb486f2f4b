// Threads that put, read, look up and free the same records while an index thread confirms and readers hold
// leases: run under a sanitizer by tests/faults/test_disk_sanitizers.py. Every read is right, or the record
// is gone.
//
//     disk_stress DIRECTORY RACES ENGINE
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "disk.hpp"
#include "errors.hpp"
#include "reader.hpp"

using namespace tiercache;

namespace {

std::uint8_t byte_of(std::uint64_t number, std::uint64_t at) {
  return static_cast<std::uint8_t>(number * 31 + at * 7);
}

std::uint64_t size_of(std::uint64_t number) { return 1 + number * 7919 % 150'000; }

RecordInfo info_of(std::uint64_t number) {
  RecordInfo info;
  std::memcpy(info.digest.data(), &number, sizeof number);
  info.raw_bytes = info.stored_bytes = size_of(number);
  info.flags = kPersistent;
  return info;
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

struct Place {
  std::mutex mutex;
  std::uint64_t slot = 0;  // 0: nothing there
  std::uint64_t number = 0;
};

DiskOptions options_in(const std::string& folder, const char* engine) {
  DiskOptions options;
  options.segments.directories = {folder + "/drive0", folder + "/drive1"};
  options.segments.capacity_bytes = 24 << 20;
  options.segments.segment_bytes = 2 << 20;
  options.segments.shared = true;
  options.segments.epoch = 1;
  options.durability = Durability::kProcess;
  options.engine = engine;
  options.bounce_buffers = 2;
  return options;
}

void check(const std::vector<std::uint8_t>& out, std::uint64_t number, std::uint64_t size) {
  for (std::uint64_t i = 0; i < size; i += 97) {
    if (out[i] != byte_of(number, i)) fail("wrong bytes");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  const std::string folder = arguments[1];
  const std::uint64_t races = std::strtoull(arguments[2], nullptr, 10);
  std::filesystem::create_directories(folder);
  DiskOptions options = options_in(folder, arguments[3]);
  if (options.engine == "io_uring") {  // the other run lets callers carry small requests themselves
    options.faults = std::make_shared<Faults>();
    FaultRule rule;
    rule.action = FaultAction::kReorder;
    rule.hold = 3;
    rule.times = 500;
    options.faults->add(rule);
  }
  Disk disk(options);
  std::vector<Place> places(12);
  std::atomic<std::uint64_t> done{0}, hits{0}, gone{0}, next{1};
  std::atomic<bool> stop{false};
  Arena arena(8 << 20, 1 << 20, MemoryOptions{});

  std::vector<std::thread> crew;
  crew.emplace_back([&] {  // the index
    try {
      while (true) {
        if (!disk.take_changes(64, 0.05, 0.001).empty()) disk.confirm_changes(true);
      }
    } catch (const Error& error) {
      if (error.kind != ErrorKind::kClosed) fail(error.what());
    }
  });
  for (unsigned t = 0; t < 2; ++t) {
    crew.emplace_back([&, t] {  // evicts and puts
      std::mt19937_64 random(t);
      std::vector<std::uint8_t> data(200'000);
      while (!stop) {
        Place& place = places[random() % places.size()];
        const std::uint64_t number = next++, size = size_of(number);
        for (std::uint64_t i = 0; i < size; ++i) data[i] = byte_of(number, i);
        try {
          disk.make_room(size, 5);
          const std::uint64_t slot = disk.reserve(size);
          disk.write(slot, data.data(), size, info_of(number));
          std::uint64_t old = 0;
          {
            const std::lock_guard lock(place.mutex);
            old = std::exchange(place.slot, slot);
            place.number = number;
          }
          if (old != 0) disk.free(old);  // a reader may be in the middle of it
        } catch (const Error& error) {
          if (error.kind != ErrorKind::kFull) fail(error.what());
        }
      }
    });
  }
  for (unsigned t = 0; t < 3; ++t) {
    crew.emplace_back([&, t] {  // reads
      std::mt19937_64 random(100 + t);
      std::vector<std::uint8_t> out(200'000);
      while (done < races) {
        Place& place = places[random() % places.size()];
        std::uint64_t slot = 0, number = 0;
        {
          const std::lock_guard lock(place.mutex);
          slot = place.slot;
          number = place.number;
        }
        if (slot == 0) continue;
        const std::uint64_t size = size_of(number);
        try {
          disk.read(slot, out.data(), size, info_of(number));
          check(out, number, size);
          ++hits;
        } catch (const Error& error) {
          if (error.kind != ErrorKind::kState) fail(error.what());
          ++gone;
        }
        ++done;
        const std::uint64_t scratch = arena.reserve(1 + random() % 5000, 5, t == 0);
        *arena.at(scratch) = 1;
        arena.release(scratch);
      }
    });
  }
  for (std::size_t t = 3; t < crew.size(); ++t) crew[t].join();
  stop = true;
  crew[1].join();
  crew[2].join();
  Reader reader(options.segments.directories, options.segments.uuid);
  std::vector<std::uint8_t> out(200'000);
  disk.flush(10);
  std::uint64_t leased = 0;
  for (const auto& [slot, value] : disk.records()) {
    reader.lease(value);
    reader.read(value, out.data());
    reader.release(value);
    ++leased;
  }
  for (Place& place : places) {
    if (place.slot != 0) disk.free(place.slot);
  }
  disk.flush(10);
  disk.check_integrity();
  arena.check_integrity();
  if (disk.used_bytes() != 0) fail("bytes leak");
  if (!disk.close(10)) fail("close did not end");
  crew[0].join();
  std::printf("%llu races: %llu hits, %llu gone, %llu leased\n", static_cast<unsigned long long>(done.load()),
              static_cast<unsigned long long>(hits.load()), static_cast<unsigned long long>(gone.load()),
              static_cast<unsigned long long>(leased));
  return hits > 0 ? 0 : 1;
}
