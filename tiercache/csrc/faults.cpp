#include "faults.hpp"

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <utility>

namespace tiercache {

void Faults::add(const FaultRule& rule) {
  const std::lock_guard lock(mutex_);
  rules_.push_back(rule);
}

void Faults::clear() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
}

std::uint64_t Faults::hits() const {
  const std::lock_guard lock(mutex_);
  return hits_;
}

bool Faults::match(const IoRequest& request, FaultRule& found) {
  const std::lock_guard lock(mutex_);
  for (FaultRule& rule : rules_) {
    if (rule.kind != request.kind || (rule.segment >= 0 && rule.segment != request.segment)) continue;
    if (rule.skip > 0) {
      --rule.skip;
      continue;
    }
    if (rule.times == 0) continue;
    --rule.times;
    ++hits_;
    found = rule;
    return true;
  }
  return false;
}

void WriteLog::add(LogEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
}

std::vector<LogEvent> WriteLog::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

namespace {

using Clock = std::chrono::steady_clock;

class FaultEngine final : public IoEngine {
 public:
  FaultEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}

  std::string name() const override { return inner_->name(); }
  void wake() override { inner_->wake(); }

  bool submit(const IoRequest& request) override {
    // A request that the inner engine turned away comes again and must not meet a second rule.
    const bool again = refused_.valid && refused_.fd == request.fd && refused_.offset == request.offset;
    FaultRule rule;
    const bool hit = again ? refused_.hit : faults_->match(request, rule);
    if (again) rule = refused_.rule;
    if (hit && rule.action == FaultAction::kError) {
      failed_.push_back({request.id, -rule.code});
      refused_.valid = false;
      return true;
    }
    IoRequest carried = request;
    const bool cut_short = hit && rule.action == FaultAction::kShort && request.length() > rule.bytes;
    if (cut_short) cut(carried, rule.bytes / 4096 * 4096);
    if (cut_short && carried.length() == 0) {
      failed_.push_back({request.id, static_cast<std::int64_t>(rule.bytes)});
      refused_.valid = false;
      return true;
    }
    IoRequest& kept = kept_[request.id] = carried;
    if (!inner_->submit(kept)) {
      kept_.erase(request.id);
      refused_ = {true, hit, request.fd, request.offset, rule};
      return false;
    }
    refused_.valid = false;
    if (cut_short) short_bytes_[request.id] = static_cast<std::int64_t>(rule.bytes);
    if (hit && rule.action == FaultAction::kLate) late_ms_[request.id] = rule.delay_ms;
    if (hit && rule.action == FaultAction::kReorder) held_ids_[request.id] = rule.hold;
    return true;
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    if (!failed_.empty()) timeout_ms = 0;
    if (!late_.empty() || !held_.empty()) timeout_ms = timeout_ms < 0 ? 1 : std::min(timeout_ms, 1);
    std::vector<IoDone> arrived;
    inner_->wait(arrived, timeout_ms);
    done.insert(done.end(), failed_.begin(), failed_.end());
    failed_.clear();
    for (IoDone& one : arrived) {
      kept_.erase(one.id);
      if (const auto cut = short_bytes_.find(one.id); cut != short_bytes_.end()) {
        if (one.result >= 0) one.result = cut->second;
        short_bytes_.erase(cut);
      }
      if (const auto late = late_ms_.find(one.id); late != late_ms_.end()) {
        late_.push_back({Clock::now() + std::chrono::milliseconds(late->second), one});
        late_ms_.erase(late);
      } else if (const auto hold = held_ids_.find(one.id); hold != held_ids_.end()) {
        held_.push_back(one);
        hold_ = hold->second;
        held_since_ = Clock::now();
        held_ids_.erase(hold);
      } else {
        done.push_back(one);
      }
    }
    const auto now = Clock::now();
    std::erase_if(late_, [&](const auto& entry) {
      if (entry.first <= now) done.push_back(entry.second);
      return entry.first <= now;
    });
    if (!held_.empty() && (held_.size() >= hold_ || now - held_since_ > std::chrono::milliseconds(5))) {
      done.insert(done.end(), held_.rbegin(), held_.rend());
      held_.clear();
    }
  }

 private:
  static void cut(IoRequest& request, std::uint64_t bytes) {
    for (unsigned i = 0; i < request.num_parts; ++i) {
      request.parts[i].iov_len = std::min<std::uint64_t>(request.parts[i].iov_len, bytes);
      bytes -= request.parts[i].iov_len;
      if (request.parts[i].iov_len == 0) {
        request.num_parts = i;
        return;
      }
    }
  }

  struct Refused {
    bool valid = false, hit = false;
    int fd = -1;
    std::uint64_t offset = 0;
    FaultRule rule;
  };
  std::unique_ptr<IoEngine> inner_;
  std::shared_ptr<Faults> faults_;
  Refused refused_;
  std::vector<IoDone> failed_, held_;
  std::vector<std::pair<Clock::time_point, IoDone>> late_;
  std::unordered_map<std::uint64_t, IoRequest> kept_;  // the inner engine points into these
  std::unordered_map<std::uint64_t, unsigned> late_ms_, held_ids_;
  std::unordered_map<std::uint64_t, std::int64_t> short_bytes_;
  unsigned hold_ = 0;
  Clock::time_point held_since_;
};

class LogEngine final : public IoEngine {
 public:
  LogEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<WriteLog> log)
      : inner_(std::move(inner)), log_(std::move(log)) {}

  std::string name() const override { return inner_->name(); }
  void wake() override { inner_->wake(); }

  bool submit(const IoRequest& request) override {
    LogEvent event{"", request.id, request.segment, request.offset, {}};
    if (request.kind == IoKind::kWrite) {
      event.what = "write";
      for (unsigned i = 0; i < request.num_parts; ++i) {
        event.bytes.append(static_cast<const char*>(request.parts[i].iov_base), request.parts[i].iov_len);
      }
    } else if (request.kind == IoKind::kSync) {
      event.what = "sync";
    }
    if (!inner_->submit(request)) return false;
    if (event.what.empty()) return true;
    kinds_[request.id] = request.kind;
    log_->add(std::move(event));
    return true;
  }

  void wait(std::vector<IoDone>& done, int timeout_ms) override {
    const std::size_t before = done.size();
    inner_->wait(done, timeout_ms);
    for (std::size_t i = before; i < done.size(); ++i) {
      const auto found = kinds_.find(done[i].id);
      if (found == kinds_.end()) continue;
      if (done[i].result >= 0)
        log_->add({found->second == IoKind::kWrite ? "done" : "synced", done[i].id, 0, 0, {}});
      kinds_.erase(found);
    }
  }

 private:
  std::unique_ptr<IoEngine> inner_;
  std::shared_ptr<WriteLog> log_;
  std::unordered_map<std::uint64_t, IoKind> kinds_;
};

}  // namespace

std::unique_ptr<IoEngine> make_fault_engine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Faults> faults) {
  return std::make_unique<FaultEngine>(std::move(inner), std::move(faults));
}

std::unique_ptr<IoEngine> make_log_engine(std::unique_ptr<IoEngine> inner, std::shared_ptr<WriteLog> log) {
  return std::make_unique<LogEngine>(std::move(inner), std::move(log));
}

}  // namespace tiercache
