// The averaging rounds without TensorFlow.
#include "cc/protocols/rounds.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/notification.h"
#include "cc/protocols/deadline_timer.h"
#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"

namespace wrapopt {
namespace {

using IntRounds = Rounds<int>;
using Code = RoundsStatus::Code;
using For = RoundWait::For;

// Seconds of a wait, of a turn, and of the grace after a quorum.
constexpr double kWait = 9, kTurn = 5, kGrace = 3;

// Rings when the test says so.
class FakeTimer : public Timer {
 public:
  Id Set(double seconds, std::function<void()> ring) override {
    set[next] = {seconds, std::move(ring)};
    return next++;
  }
  void Cancel(Id id) override { set.erase(id); }

  // Rings the first timer of so many seconds.
  void Ring(double seconds) {
    auto i = set.begin();
    while (i->second.first != seconds) ++i;
    const auto ring = i->second.second;
    set.erase(i);
    ring();
  }

  std::map<Id, std::pair<double, std::function<void()>>> set;
  Id next = 0;
};

// The answers of a wait.
struct Heard {
  std::string workers() const {
    std::string names;
    for (const std::string& worker : known.workers) names += worker;
    return names;
  }

  int times = 0;
  RoundsStatus status;
  Known known;
};
using HeardPtr = std::shared_ptr<Heard>;

bool Stage(IntRounds* server, const std::string& worker, const Known& known,
           int value) {
  return server->Stage(worker, known, value + 0.5, 1, 0, {value});
}

RoundsStatus Next(IntRounds* server) {
  IntRounds::Deferred after(server);
  return server->Next(&after);
}

// Ends a round on a server. Returns the sum of values; -1 if it was over.
int End(IntRounds* server, const Known& known) {
  bool is_open;
  EXPECT_EQ(server->CheckClosed(known, &is_open).message, "");
  if (!is_open) return -1;
  int sum = 0;
  for (const auto& member : server->TakeValues()) {
    sum += member.values[0];
    EXPECT_EQ(member.weight, member.values[0] + 0.5);
  }
  EXPECT_TRUE(Next(server).ok());
  return sum;
}

bool Restore(IntRounds* server, Place place, int64_t from,
             const std::string& worker = "a", std::vector<int>* got = nullptr) {
  std::vector<int> values;
  bool restored;
  IntRounds::Deferred after(server);
  return server->Restore(worker, from, place, /*needs_values=*/got != nullptr,
                         got ? got : &values, &restored, &after).ok() &&
         restored;
}

// Two servers for two workers. Round 0 of generation 1 is open.
struct Fixture {
  Fixture() {
    for (const auto& server : {lead, other}) Restore(server.get(), {0, 1}, 0);
  }

  HeardPtr Start(RoundWait wait) {
    const auto heard = std::make_shared<Heard>();
    wait.timeout_secs = kWait;
    wait.watch = watch;
    wait.unwatch = [this] { ++unwatched; };
    wait.done = [heard](const RoundAnswer& answer) {
      ++heard->times;
      heard->status = answer.status;
      heard->known = answer.known;
    };
    lead->Start(std::move(wait));
    return heard;
  }
  HeardPtr Enter(const std::string& worker, Place place, int64_t process = 0) {
    return Start({For::kTurn, place, worker, process, most_turns, kTurn});
  }
  HeardPtr Close(Place place, int64_t min_workers, double grace = kForever) {
    return Start({For::kClose, place, "", 0, 0, 0, min_workers, grace});
  }
  HeardPtr Read(const std::string& worker) {
    return Start({For::kRead, {}, worker});
  }
  bool Arrive(const std::string& worker, const Known& told) {
    return lead->Arrive(worker, told, &now);
  }
  // Makes a worker a member of the open round.
  void Bring(const std::string& worker, int value) {
    const Known known = Enter(worker, lead->known().place)->known;
    EXPECT_TRUE(Stage(other.get(), worker, known, value));
    EXPECT_TRUE(Stage(lead.get(), worker, known, value));
    EXPECT_TRUE(Arrive(worker, known));
  }

  FakeTimer timer;
  std::vector<std::string> warnings;
  std::function<bool(std::function<void()>)> watch;
  int unwatched = 0;
  int64_t most_turns = 1;
  Known now;  // That an Arrive told.
  const std::function<void(const std::string&)> warn =
      [this](const std::string& warning) { warnings.push_back(warning); };
  std::shared_ptr<IntRounds> lead =
      std::make_shared<IntRounds>("r", 2, &timer, warn);
  std::shared_ptr<IntRounds> other =
      std::make_shared<IntRounds>("r", 2, &timer, warn);
};

TEST(Rounds, ARoundOfAll) {
  Fixture f;
  const HeardPtr closed = f.Close({0, 1}, 2);
  f.Bring("b", 3);
  EXPECT_EQ(closed->times, 0);
  EXPECT_TRUE(f.other->Follow(f.now));  // It now uses the values, and
  EXPECT_EQ(f.other->staged(), 0);      // holds them no more.
  f.Bring("a", 5);
  EXPECT_EQ(closed->times, 1);
  EXPECT_EQ(closed->workers(), "ab");
  for (const auto& server : {f.other, f.lead}) {
    EXPECT_EQ(End(server.get(), closed->known), 8);
    EXPECT_EQ(End(server.get(), closed->known), -1);
    EXPECT_TRUE(server->known().place == (Place{1, 1}));
  }
  // Answered waits and turns leave no deadline behind.
  EXPECT_EQ(f.timer.set.size(), 0u);
  EXPECT_EQ(f.warnings.size(), 0u);
  // Only of the last round, the members are known.
  EXPECT_EQ(f.Close({0, 1}, 2)->workers(), "ab");
  const Known never = f.Close({7, 1}, 2)->known;
  EXPECT_TRUE(never.place == (Place{7, 1}) && never.closed);
  EXPECT_EQ(never.workers.size(), 0u);
}

// Nobody waits for it, and it does not end a round for others.
TEST(Rounds, AMemberWithoutValues) {
  Fixture f;
  const HeardPtr closed = f.Close({0, 1}, 1, kGrace);
  const auto bring = [&f](const std::string& worker) {
    const Known known = f.Enter(worker, f.lead->known().place)->known;
    for (const auto& server : {f.other, f.lead}) {
      EXPECT_TRUE(server->Stage(worker, known, 0, 0, 0, {}));
    }
    EXPECT_TRUE(f.Arrive(worker, known));
  };
  bring("a");
  EXPECT_EQ(f.timer.set.size(), 1u);  // That of the wait: no grace begins.
  f.Bring("b", 3);
  EXPECT_EQ(closed->workers(), "ab");
  EXPECT_EQ(closed->known.without_values, std::vector<std::string>{"a"});
  for (const auto& server : {f.other, f.lead}) {
    EXPECT_EQ(End(server.get(), closed->known), 3);
  }
  EXPECT_EQ(f.Close({0, 1}, 1)->known.without_values.size(), 1u);
  // Also one of which nobody has values ends.
  for (const char* worker : {"a", "b"}) bring(worker);
  const HeardPtr empty = f.Close({1, 1}, 2);
  EXPECT_EQ(empty->known.without_values.size(), 2u);
  EXPECT_EQ(End(f.lead.get(), empty->known), 0);
}

TEST(Rounds, AQuorumAfterTheDeadline) {
  Fixture f;
  f.Bring("a", 1);
  HeardPtr closed = f.Close({0, 1}, 1);
  EXPECT_EQ(closed->times, 0);
  f.timer.Ring(kWait);
  EXPECT_EQ(closed->workers(), "a");
  ASSERT_EQ(f.warnings.size(), 1u);
  EXPECT_EQ(f.warnings[0],
            "Round 0 of averaging rounds 'r' is made of 1 of 2 workers: 'a'.");
  // It is closed once.
  EXPECT_EQ(f.Close({0, 1}, 1)->workers(), "a");
  EXPECT_EQ(f.warnings.size(), 1u);
  const auto next = [&] {
    for (const auto& server : {f.other, f.lead}) {
      End(server.get(), closed->known);
    }
    f.Bring("a", 1);
    closed = f.Close(f.lead->known().place, 1);
  };
  next();  // The dead worker is not expected again, so this need not wait.
  EXPECT_EQ(closed->workers(), "a");
  End(f.lead.get(), closed->known);
  End(f.other.get(), closed->known);
  f.Bring("a", 1);
  EXPECT_EQ(f.Close(f.lead->known().place, 2)->times, 0);  // Needs another.
  closed = f.Close(f.lead->known().place, 1);
  // It enters again, too late: the next round waits for it.
  EXPECT_EQ(f.Enter("b", {0, 1})->known.turn, -1);
  next();
  EXPECT_EQ(closed->times, 0);
  f.Bring("b", 1);
  EXPECT_EQ(closed->workers(), "ab");
  // So does a round whose center it reads.
  next();
  f.timer.Ring(kWait);
  next();
  EXPECT_EQ(closed->times, 1);
  f.Read("b");
  next();
  EXPECT_EQ(closed->times, 0);
  f.timer.Ring(kWait);
  f.lead->Expect("b");
  next();
  EXPECT_EQ(closed->times, 0);
  // A new generation waits for all.
  Restore(f.lead.get(), {2, 2}, 1);
  Restore(f.other.get(), {2, 2}, 1);
  f.Bring("a", 1);
  closed = f.Close({2, 2}, 1);
  f.timer.Ring(kWait);
  Restore(f.lead.get(), {2, 3}, 2);
  Restore(f.other.get(), {2, 3}, 2);
  f.Bring("a", 1);
  EXPECT_EQ(f.Close({2, 3}, 1)->times, 0);
}

TEST(Rounds, DeadlinesOfOtherWaits) {
  Fixture f;
  f.Bring("a", 1);
  const HeardPtr closed = f.Close({0, 1}, 2, kGrace);
  EXPECT_EQ(f.timer.set.size(), 1u);  // No grace before there are enough.
  f.timer.Ring(kWait);
  EXPECT_TRUE(closed->status.code == Code::kDeadlineExceeded);
  EXPECT_EQ(closed->status.message,
            "round 0 of averaging rounds 'r' got values of 1 workers within 9 "
            "seconds ('a'), but needs 2 of 2: restart the others, wait longer, "
            "or reduce min_workers");
  Fixture g;
  const HeardPtr graced = g.Close({0, 1}, 1, kGrace);
  g.Bring("b", 1);
  g.timer.Ring(kGrace);
  EXPECT_EQ(graced->workers(), "b");
  EXPECT_EQ(g.timer.set.size(), 0u);
  Fixture h;  // All come within the grace.
  h.Close({0, 1}, 1, kGrace);
  h.Bring("a", 1);
  EXPECT_EQ(h.timer.set.size(), 2u);
  h.Bring("b", 1);
  EXPECT_EQ(h.timer.set.size(), 0u);
}

TEST(Rounds, ARestoreOfAnotherGenerationChangesNothing) {
  Fixture f;
  const HeardPtr turn = f.Enter("a", {0, 1});
  EXPECT_FALSE(Restore(f.lead.get(), {0, 3}, 2));
  EXPECT_TRUE(f.lead->known().place == (Place{0, 1}));
  EXPECT_EQ(f.timer.set.size(), 1u);  // The end of the turn.
  EXPECT_TRUE(f.lead->Release("a", turn->known.turn));
}

TEST(Rounds, AServerThatIsRestartedKeepsNobodyWaiting) {
  Fixture f;
  f.lead = std::make_shared<IntRounds>("r", 2, &f.timer, f.warn);
  EXPECT_EQ(f.lead->subject(), "averaging rounds 'r'");
  EXPECT_EQ(f.lead->known().turn, -1);
  EXPECT_EQ(f.Close({3, 1}, 2)->times, 1);
  // Until its center is written.
  EXPECT_TRUE(Restore(f.lead.get(), {-1, 1}, 0));
  EXPECT_EQ(f.Enter("a", {-1, 1})->times, 0);
}

// News may come late: it brings back no turn that is over.
TEST(Rounds, OldNewsOfTurns) {
  Fixture f;
  Known known{{0, 1}};
  known.turn = 1;
  known.turns = {1, {}};
  EXPECT_TRUE(f.other->Follow(known));
  known.turns.alive = {1};
  EXPECT_FALSE(Stage(f.other.get(), "a", known, 1));
}

TEST(Rounds, AWaitForAnotherRoundClosesNone) {
  Fixture f;
  f.Bring("a", 1);
  f.Bring("b", 1);
  EXPECT_EQ(f.Close({3, 1}, 1)->times, 1);
  EXPECT_FALSE(f.lead->known().closed);
}

TEST(Rounds, AStepThatEnds) {
  Fixture f;
  std::function<void()> end;
  f.watch = [&end](std::function<void()> ended) {
    end = std::move(ended);
    return true;
  };
  const HeardPtr first = f.Close({0, 1}, 1);
  end();
  EXPECT_TRUE(first->status.code == Code::kCancelled);
  EXPECT_EQ(f.timer.set.size(), 0u);
  // The one that watches has called; it is not called in turn.
  EXPECT_EQ(f.unwatched, 0);
  end();
  EXPECT_EQ(first->times, 1);

  const HeardPtr second = f.Close({0, 1}, 1);
  Next(f.lead.get());
  EXPECT_EQ(second->times, 1);
  EXPECT_EQ(f.unwatched, 1);

  f.watch = [](std::function<void()>) { return false; };
  EXPECT_TRUE(f.Close({1, 1}, 1)->status.code == Code::kCancelled);
  EXPECT_EQ(f.timer.set.size(), 0u);
}

TEST(Rounds, TheEndOfTheRounds) {
  Fixture f;
  const HeardPtr closed = f.Close({0, 1}, 1);
  f.lead->End();
  EXPECT_TRUE(closed->status.code == Code::kAborted);
  EXPECT_TRUE(f.Enter("a", {0, 1})->status.code == Code::kAborted);
  // Deadlines that ring after the rounds are gone find nothing.
  Fixture g;
  const HeardPtr turn = g.Enter("a", {0, 1}), waits = g.Enter("b", {0, 1});
  g.lead.reset();
  g.timer.Ring(kTurn);
  g.timer.Ring(kWait);
  EXPECT_EQ(waits->times, 0);
}

TEST(Rounds, Turns) {
  Fixture f;
  const Known a = f.Enter("a", {0, 1})->known;
  const HeardPtr b = f.Enter("b", {0, 1});
  EXPECT_EQ(b->times, 0);
  EXPECT_TRUE(Stage(f.lead.get(), "a", a, 1));
  EXPECT_TRUE(Stage(f.other.get(), "a", a, 1));
  f.timer.Ring(kTurn);  // That of a is over.
  EXPECT_EQ(b->known.turn, a.turn + 1);
  EXPECT_FALSE(Stage(f.lead.get(), "a", a, 1));
  EXPECT_FALSE(f.Arrive("a", a));
  EXPECT_EQ(f.lead->staged(), 0);
  // Another server hears of it from b, and drops the values, too.
  EXPECT_EQ(f.other->staged(), 1);
  EXPECT_TRUE(Stage(f.other.get(), "b", b->known, 1));
  EXPECT_EQ(f.other->staged(), 1);
  EXPECT_FALSE(Stage(f.other.get(), "a", a, 1));

  const HeardPtr waits = f.Enter("a", {0, 1});
  f.timer.Ring(kWait);
  EXPECT_TRUE(waits->status.code == Code::kDeadlineExceeded);
  EXPECT_EQ(waits->status.message,
            "round 0 of averaging rounds 'r' gave no turn within 9 seconds: "
            "restart the others, wait longer, or reduce min_workers");
  f.most_turns = 2;
  EXPECT_EQ(f.Enter("a", {0, 1})->known.turns.alive.size(), 2u);
}

TEST(Rounds, AWorkerThatEntersAgain) {
  Fixture f;
  const Known a = f.Enter("a", {0, 1})->known;
  EXPECT_TRUE(Stage(f.lead.get(), "a", a, 1));
  const HeardPtr b = f.Enter("b", {0, 1});
  // Its turn is over, and b waited before.
  const HeardPtr again = f.Enter("a", {0, 1});
  EXPECT_EQ(b->known.turn, a.turn + 1);
  EXPECT_EQ(f.lead->staged(), 0);
  EXPECT_EQ(again->times, 0);
  // So is its wait.
  const HeardPtr third = f.Enter("a", {0, 1});
  EXPECT_TRUE(again->status.ok());
  EXPECT_EQ(again->known.turn, -1);
  EXPECT_TRUE(f.lead->Release("b", b->known.turn));
  EXPECT_EQ(third->known.turn, a.turn + 2);
  EXPECT_EQ(third->known.turns.alive.size(), 1u);
}

TEST(Rounds, ATurnThatIsGivenUp) {
  Fixture f;
  const Known a = f.Enter("a", {0, 1})->known;
  const HeardPtr b = f.Enter("b", {0, 1});
  EXPECT_TRUE(Stage(f.lead.get(), "a", a, 1));
  EXPECT_FALSE(f.lead->Release("a", a.turn + 1));
  EXPECT_EQ(b->times, 0);
  EXPECT_TRUE(f.lead->Release("a", a.turn));
  EXPECT_EQ(b->known.turn, a.turn + 1);
  EXPECT_EQ(f.lead->staged(), 0);
  EXPECT_FALSE(f.Arrive("a", a));
  EXPECT_FALSE(f.lead->Release("a", a.turn));
}

TEST(Rounds, Join) {
  Fixture f;
  int64_t workers = 0;
  const auto join = [&](const std::string& worker, int64_t process,
                        bool resumes = false) {
    return f.lead->Join(worker, process, resumes, &workers).message;
  };
  const std::string what_to_do =
      ": a restarted worker passes resume=True; a new job has another name, or "
      "begins after the old one is dropped";
  EXPECT_TRUE(IntRounds("r", 1, &f.timer, nullptr).is_unused());
  EXPECT_FALSE(f.lead->is_unused());
  EXPECT_EQ(join("a", 1), "");
  EXPECT_EQ(join("a", 1), "");
  EXPECT_EQ(workers, 1);
  EXPECT_EQ(join("a", 2),
            "worker 'a' of averaging rounds 'r' is another process already, "
            "and round 0 is open" + what_to_do);
  EXPECT_EQ(f.Enter("b", {0, 1}, 3)->times, 1);  // It is known, too.
  EXPECT_EQ(join("c", 4),
            "averaging rounds 'r' have num_workers = 2, but 'c' came to round "
            "0 after 'a', 'b'" + what_to_do);
  EXPECT_EQ(workers, 1);
  const std::string too_many =
      "averaging rounds 'r' have num_workers = 2, but 'c' came to round 0 "
      "after 'a', 'b': give each worker a unique name that does not change, or "
      "correct num_workers";
  EXPECT_EQ(join("c", 4, true), too_many);
  EXPECT_EQ(f.Enter("c", {0, 1}, 4)->status.message, too_many);
  // The place of a worker that has left is free, not its name.
  EXPECT_TRUE(f.lead->Leave("b", 3));
  EXPECT_NE(join("c", 4), "");
  EXPECT_EQ(join("c", 4, true), "");
  EXPECT_EQ(workers, 2);
  EXPECT_TRUE(f.lead->left().empty());
  EXPECT_NE(join("b", 5, true), "");
  EXPECT_EQ(join("a", 2, true), "");
  for (const bool resumes : {false, true}) {
    EXPECT_EQ(join("a", 1, resumes),
              "worker 'a' of averaging rounds 'r' is another process now: give "
              "each worker a unique name");
  }
}

// Rounds do not wait for a worker that has left, and count it as come.
TEST(Rounds, Leave) {
  for (const int64_t min_workers : {1, 2}) {
    Fixture f;
    f.most_turns = 2;
    EXPECT_EQ(f.Enter("b", {0, 1}, 7)->times, 1);
    f.Bring("a", 1);
    const HeardPtr closed = f.Close({0, 1}, min_workers);
    EXPECT_FALSE(f.lead->Leave("b", 8));  // Another process.
    EXPECT_FALSE(f.lead->Leave("b", 0));  // The server knows better.
    EXPECT_EQ(closed->times, 0);
    EXPECT_EQ(f.lead->known().turns.alive.size(), 1u);
    EXPECT_TRUE(f.lead->Leave("b", 7));
    EXPECT_TRUE(f.lead->known().turns.alive.empty());
    EXPECT_EQ(closed->workers(), "a");
    EXPECT_EQ(f.lead->left(), (std::set<std::string>{"b"}));
    EXPECT_EQ(End(f.lead.get(), closed->known), 1);
    // A late call of it does not bring it back.
    EXPECT_NE(f.Enter("b", {1, 1}, 7)->status.message, "");
    // A round without members does not end.
    const HeardPtr empty = f.Close({1, 1}, min_workers);
    EXPECT_EQ(empty->times, 0);
    f.timer.Ring(kWait);
    EXPECT_EQ(empty->status.message,
              "round 1 of averaging rounds 'r' got values of 0 workers within "
              "9 seconds (none), but needs 1 of 1: restart the others, wait "
              "longer, or reduce min_workers");
    // Another process of it does.
    EXPECT_EQ(f.Enter("b", {1, 1}, 9)->times, 1);
    EXPECT_TRUE(f.lead->left().empty());
    EXPECT_FALSE(f.lead->Leave("b", 7));
    // A server that was restarted knows nobody, and is told.
    IntRounds server("r", 2, &f.timer, nullptr);
    EXPECT_TRUE(server.Leave("b", 0));
    EXPECT_TRUE(server.Leave("b", 0));
    int64_t workers = 0;
    EXPECT_TRUE(server.Join("b", 9, true, &workers).ok());
    EXPECT_EQ(workers, 1);
    EXPECT_FALSE(server.Leave("b", 0));
  }
}

TEST(Rounds, AWorkerLeavesWithoutATurn) {
  Fixture f;
  f.Bring("a", 1);
  const HeardPtr closed = f.Close({0, 1}, 2);
  EXPECT_TRUE(f.lead->Leave("b", 0));
  EXPECT_EQ(closed->workers(), "a");
}

// A member that leaves counts once.
TEST(Rounds, AMemberLeaves) {
  Fixture f;
  f.Bring("a", 1);
  EXPECT_TRUE(f.lead->Leave("a", 0));
  const HeardPtr closed = f.Close({0, 1}, 2);
  EXPECT_EQ(closed->times, 0);
  f.Bring("b", 2);
  EXPECT_EQ(closed->workers(), "ab");
}

// A round that a deadline has closed expects its members alone, and who reads.
TEST(Rounds, ReadersThatAreNoWorkers) {
  for (const std::string reader : {"", "b"}) {
    Fixture f;
    f.Bring("a", 1);
    const HeardPtr closed = f.Close({0, 1}, 1);
    f.timer.Ring(kWait);
    EXPECT_EQ(closed->times, 1);
    End(f.lead.get(), closed->known);
    EXPECT_EQ(f.Read(reader)->times, 1);
    RoundWait enter{For::kTurn, {1, 1}, "a", 0, 1, kTurn};
    const Known known = f.Start(std::move(enter))->known;
    EXPECT_TRUE(Stage(f.lead.get(), "a", known, 1));
    EXPECT_TRUE(f.Arrive("a", known));
    EXPECT_EQ(f.Close({1, 1}, 1)->times, reader.empty() ? 1 : 0);
  }
}

TEST(Rounds, Readers) {
  Fixture f;
  const std::string workers = "abcdefg";
  std::vector<HeardPtr> reads;
  for (const char worker : workers) reads.push_back(f.Read({worker}));
  const auto answered = [&reads] {
    std::string times;
    for (const HeardPtr& read : reads) times += std::to_string(read->times);
    return times;
  };
  EXPECT_EQ(answered(), "1111000");
  // A worker that reads already gets the next part at once.
  EXPECT_EQ(f.Read("b")->times, 1);
  EXPECT_EQ(f.timer.set.size(), 4u + 3u);
  f.lead->Release("b", -1);
  f.lead->Release("b", -1);
  EXPECT_EQ(f.timer.set.size(), 4u + 2u);
  EXPECT_EQ(answered(), "1111100");
  f.timer.Ring(kReaderSecs);  // That of a, which has stopped.
  EXPECT_EQ(answered(), "1111110");
  EXPECT_EQ(f.Read("a")->times, 0);
  f.timer.Ring(kWait);
  EXPECT_EQ(reads[6]->status.message,
            "round 0 of averaging rounds 'r' gave no turn to read within 9 "
            "seconds: restart the others, wait longer, or reduce min_workers");
  // Rounds, turns and members do not depend on those that read.
  f.Bring("a", 1);
  EXPECT_EQ(f.Close({0, 1}, 2)->times, 0);
}

TEST(Rounds, ValuesThatAreNotWanted) {
  Fixture f;
  f.most_turns = 9;
  const Known a = f.Enter("a", {0, 1})->known, b = f.Enter("b", {0, 1})->known;
  EXPECT_FALSE(f.Arrive("a", a));  // Without values.
  EXPECT_TRUE(f.lead->Stage("a", a, 1, 2, 0, {1}));
  EXPECT_FALSE(f.Arrive("a", a));  // With half of them.
  Known again = f.Enter("a", {0, 1})->known;
  EXPECT_TRUE(f.lead->Stage("a", again, 1, 2, 1, {1}));
  EXPECT_FALSE(f.Arrive("a", again));  // Those of a former turn are dropped.
  EXPECT_FALSE(f.Arrive("a", a));
  EXPECT_TRUE(Stage(f.lead.get(), "a", again, 1));
  EXPECT_FALSE(f.Arrive("a", a));  // In another turn.
  for (const Place place : {Place{1, 1}, Place{-1, 1}, Place{0, 0}}) {
    Known elsewhere = again;
    elsewhere.place = place;
    EXPECT_FALSE(Stage(f.lead.get(), "a", elsewhere, 1));
    EXPECT_FALSE(f.Arrive("a", elsewhere));
    EXPECT_FALSE(f.other->Follow(elsewhere));
  }
  EXPECT_TRUE(f.Arrive("a", again));
  const auto refuses = [&](const std::string& worker, const Known& known) {
    EXPECT_FALSE(Stage(f.lead.get(), worker, known, 1));
    EXPECT_FALSE(f.Arrive(worker, known));
    EXPECT_EQ(f.Enter(worker, {0, 1})->known.turn, -1);
  };
  refuses("a", a);  // A member.
  EXPECT_TRUE(Stage(f.lead.get(), "b", b, 1));
  f.Close({0, 1}, 1);
  f.timer.Ring(kWait);
  refuses("b", b);  // A closed round.
  for (const Place place : {Place{1, 1}, Place{-1, 1}, Place{0, 0}}) {
    const Known known = f.Enter("b", place)->known;
    EXPECT_EQ(known.turn, -1);
    EXPECT_TRUE(known.place == place);
  }
  EXPECT_TRUE(f.lead->known().turns.alive.empty());
}

TEST(Rounds, NamesThatAreWrong) {
  Fixture f;
  // Another process takes a name.
  for (const int64_t process : {0, 10, 11}) {
    EXPECT_TRUE(f.Enter("a", {0, 1}, process)->status.ok());
  }
  for (const int64_t process : {0, 10}) {
    EXPECT_EQ(f.Enter("a", {0, 1}, process)->status.message,
              "worker 'a' of averaging rounds 'r' is another process now: give "
              "each worker a unique name");
  }
  // The one that is refused ends no turn.
  EXPECT_EQ(f.lead->known().turns.alive.size(), 1u);
  EXPECT_TRUE(f.Enter("a", {0, 1}, 11)->status.ok());
}

TEST(Rounds, NamesOfAnyBytes) {
  EXPECT_EQ(InQuotes("a ~b"), "'a ~b'");
  EXPECT_EQ(InQuotes({"it's", "\\", "\n\x7f\xff"}),
            "'it\\x27s', '\\x5c', '\\x0a\\x7f\\xff'");
}

// While a round is open, only its newest members are told.
TEST(Rounds, ManyMembers) {
  constexpr int kMany = 20;
  Fixture f;
  for (auto* server : {&f.lead, &f.other}) {
    *server = std::make_shared<IntRounds>("r", kMany, &f.timer, f.warn);
    Restore(server->get(), {0, 1}, 0);
  }
  for (int i = 0; i < kMany; ++i) f.Bring(std::string(1, 'a' + i), 1);
  EXPECT_EQ(f.now.workers.front(), "e");
  EXPECT_EQ(f.now.workers.back(), "t");
  const Known closed = f.Close({0, 1}, 1)->known;
  EXPECT_EQ(closed.workers.size(), size_t{kMany});
  EXPECT_EQ(End(f.other.get(), closed), kMany);
}

TEST(Rounds, TheEndOfARound) {
  Fixture f;
  f.Bring("a", 1);
  f.Bring("b", 2);
  bool is_open;
  EXPECT_EQ(f.lead->CheckClosed(f.now, &is_open).message,
            "round 0 of averaging rounds 'r' must be closed before it ends, "
            "got values of 'a', 'b'");
  Known known = f.Close({0, 1}, 1)->known;
  known.workers = {"a", "c"};
  EXPECT_EQ(f.other->CheckClosed(known, &is_open).message,
            "round 0 of averaging rounds 'r' must have the values of 2 workers "
            "before it ends, got values of 'a'");
  EXPECT_FALSE(f.lead->CheckClosed(known, &is_open).ok());
  Restore(f.lead.get(), {kLastRound, 2}, 1);
  EXPECT_TRUE(Next(f.lead.get()).code == Code::kFailedPrecondition);
}

TEST(Rounds, ATurnThatNobodyGave) {
  Fixture f;
  Known known = f.lead->known();
  known.turn = 7;
  Stage(f.lead.get(), "a", known, 1);
  EXPECT_FALSE(f.Arrive("a", known));
  // A turn that the lead gave ends on another server, too.
  known = f.Enter("a", {0, 1})->known;
  EXPECT_TRUE(Stage(f.other.get(), "a", known, 1));
  EXPECT_TRUE(f.other->Arrive("a", known, &f.now));
  EXPECT_TRUE(f.now.turns.alive.empty());
}

// While a center is being written, workers wait, whatever they wait for.
TEST(Rounds, StoppedRounds) {
  Fixture f;
  f.Bring("a", 1);
  const HeardPtr closed = f.Close({0, 1}, 2);
  Restore(f.lead.get(), {-1, 2}, 1);
  EXPECT_EQ(closed->times, 0);
  const HeardPtr turn = f.Enter("b", {-1, 2});
  EXPECT_EQ(turn->times, 0);
  Restore(f.lead.get(), {0, 3}, 2);
  EXPECT_EQ(closed->times, 1);
  EXPECT_EQ(closed->workers(), "");
  EXPECT_EQ(turn->times, 1);
  EXPECT_EQ(turn->known.turn, -1);
}

// The time for the chief comes after that for other workers.
TEST(Rounds, AWaitThatEndsInStoppedRounds) {
  Fixture f;
  f.Bring("a", 1);
  RoundWait close = {For::kClose, {0, 1}, "", 0, 0, 0, 1, kGrace};
  RoundWait enter = {For::kTurn, {-1, 2}, "b", 0, 1, kTurn};
  close.stopped_secs = enter.stopped_secs = 2;
  const HeardPtr lasts = f.Start(close), begins = f.Start(close);
  Restore(f.lead.get(), {-1, 2}, 1);
  const HeardPtr turn = f.Start(enter);
  for (int i = 0; i < 2; ++i) f.timer.Ring(kGrace);
  for (int i = 0; i < 3; ++i) f.timer.Ring(kWait);
  ASSERT_EQ(lasts->times + begins->times + turn->times, 0);
  f.timer.Ring(2);
  EXPECT_EQ(lasts->status.message,
            "averaging rounds 'r' are stopped, and the chief has begun none "
            "within 11 seconds: start the chief, or wait longer");
  Restore(f.lead.get(), {0, 3}, 2);
  EXPECT_TRUE(begins->status.ok());
  EXPECT_TRUE(turn->status.ok());
  EXPECT_EQ(begins->times + turn->times, 2);
  EXPECT_EQ(f.timer.set.size(), 0u);
  close.place = {0, 3};  // Rounds that are open have their own time alone.
  const HeardPtr open = f.Start(close);
  f.timer.Ring(kWait);
  EXPECT_EQ(open->status.code, Code::kDeadlineExceeded);
}

TEST(Rounds, ARestore) {
  Fixture f;
  const HeardPtr turn = f.Enter("a", {0, 1}), closed = f.Close({0, 1}, 1);
  // The turn to restore comes when no other is alive.
  const HeardPtr restores = f.Start({For::kRestore, {0, 1}, "b", 0, 0, kTurn});
  EXPECT_EQ(restores->times, 0);
  f.timer.Ring(kTurn);
  EXPECT_EQ(restores->times, 1);
  Known known = restores->known;
  known.place = {4, 3};
  EXPECT_TRUE(Stage(f.lead.get(), "b", known, 7));
  // From another generation; to one that is not later; without values.
  std::vector<int> got;
  EXPECT_FALSE(Restore(f.lead.get(), {4, 3}, 2, "b", &got));
  EXPECT_FALSE(Restore(f.lead.get(), {4, 1}, 1, "b", &got));
  EXPECT_FALSE(Restore(f.lead.get(), {4, 3}, 1, "a", &got));
  EXPECT_TRUE(f.lead->known().place == (Place{0, 1}));
  EXPECT_TRUE(Restore(f.lead.get(), {4, 3}, 1, "b", &got));
  EXPECT_EQ(got, std::vector<int>{7});
  EXPECT_TRUE(f.lead->known().place == (Place{4, 3}));
  // The waits for the old place are over, and so are its turns.
  EXPECT_EQ(closed->times, 1);
  EXPECT_EQ(closed->workers(), "");
  EXPECT_EQ(f.timer.set.size(), 0u);
  // Without values, only the open round may begin again.
  known = f.Enter("a", {4, 3})->known;
  EXPECT_TRUE(Stage(f.lead.get(), "a", known, 7));
  EXPECT_TRUE(Restore(f.lead.get(), {4, 5}, 3, "b", &got));
  EXPECT_EQ(f.lead->staged(), 0);
  EXPECT_TRUE(f.lead->known().turns.alive.empty());
  EXPECT_EQ(f.Start({For::kRestore, {4, 3}})->known.turn, -1);
}

// It gives turns from 1 on again.
TEST(Rounds, ALeadThatRestarts) {
  Fixture f;
  f.most_turns = 9;
  for (int i = 0; i < 3; ++i) f.other->Follow(f.Enter("a", {0, 1})->known);
  f.lead = std::make_shared<IntRounds>("r", 2, &f.timer, f.warn);
  Restore(f.other.get(), {0, 2}, 1);
  Restore(f.lead.get(), {0, 2}, 0);
  f.Bring("a", 1);
}

// Whatever the step after which b stops, a can finish the round.
TEST(Rounds, AWorkerThatStops) {
  for (int stop = 0; stop <= 9; ++stop) {
    Fixture f;
    int step = 0;
    const auto goes_on = [&] { return step++ < stop; };
    Known known;
    if (goes_on()) known = f.Enter("b", {0, 1})->known;
    if (goes_on()) f.other->Follow(known);
    if (goes_on()) f.other->Stage("b", known, 2.5, 1, 0, {2});
    if (goes_on()) f.lead->Stage("b", known, 1, 2, 0, {0});
    if (goes_on()) f.lead->Stage("b", known, 2.5, 1, 0, {2});
    const bool is_member = goes_on() && f.Arrive("b", known);
    if (goes_on()) f.other->Follow(f.now);

    const HeardPtr turn = f.Enter("a", {0, 1});
    if (turn->times == 0) f.timer.Ring(kTurn);
    EXPECT_TRUE(Stage(f.other.get(), "a", turn->known, 5));
    EXPECT_TRUE(Stage(f.lead.get(), "a", turn->known, 5));
    EXPECT_TRUE(f.Arrive("a", turn->known));
    const HeardPtr closed = f.Close({0, 1}, 1);
    if (!is_member) f.timer.Ring(kWait);
    EXPECT_EQ(closed->workers(), is_member ? "ab" : "a");
    for (const auto& server : {f.other, f.lead}) {
      const int sum = is_member ? 7 : 5;
      const bool is_over = goes_on() && End(server.get(), closed->known) >= 0;
      EXPECT_EQ(End(server.get(), closed->known), is_over ? -1 : sum);
      EXPECT_TRUE(server->known().place == (Place{1, 1})) << stop;
      EXPECT_EQ(server->staged(), 0) << stop;
    }
    EXPECT_EQ(f.timer.set.size(), 0u) << stop;
  }
}

// A callback runs without a lock, also of the caller.
TEST(Rounds, AreCalledByTheirCallbacks) {
  Fixture f;
  std::string heard;
  RoundWait wait{For::kClose, {0, 1}};
  wait.done = [&](const RoundAnswer&) {
    f.Enter("a", {1, 1});
    heard = f.Close({0, 1}, 2)->workers() + "after";
  };
  f.lead->Start(std::move(wait));
  EXPECT_EQ(f.timer.set.size(), 0u);  // It may wait for ever.
  Next(f.lead.get());
  EXPECT_EQ(heard, "after");
}

// The answer of a wait, in a thread that waits for it.
Known Wait(IntRounds* rounds, RoundWait wait) {
  Notification answered;
  RoundAnswer result;
  wait.timeout_secs = 100;
  wait.done = [&](const RoundAnswer& answer) {
    result = answer;
    answered.Notify();
  };
  rounds->Start(std::move(wait));
  answered.Wait();
  EXPECT_EQ(result.status.message, "");
  return result.known;
}

// Each of the workers ends rounds, on two servers.
TEST(Rounds, InThreads) {
  constexpr int kWorkers = 3, kRounds = 200;
  std::shared_ptr<IntRounds> servers[2];  // The lead is the last.
  std::mutex ends[2];
  int64_t ended[2] = {};
  for (auto& server : servers) {
    server = std::make_shared<IntRounds>(
        "r", kWorkers, &DeadlineTimer::Get(),
        [](const std::string& warning) { ADD_FAILURE() << warning; });
    Restore(server.get(), {0, 1}, 0);
  }
  IntRounds* const lead = servers[1].get();
  InThreads(kWorkers, [&](int t) {
    const std::string name = std::to_string(t);
    for (int64_t round = 0; round < kRounds; ++round) {
      const Place place = {round, 1};
      const Known turn =
          Wait(lead, {For::kTurn, place, name, 0, /*most_turns=*/2, 100});
      for (const auto& server : servers) {
        EXPECT_TRUE(
            Stage(server.get(), name, turn, 1000 * round + t));
      }
      Known known;
      EXPECT_TRUE(lead->Arrive(name, turn, &known));
      servers[0]->Follow(known);
      RoundWait close{For::kClose, place};
      close.min_workers = kWorkers;
      known = Wait(lead, std::move(close));
      for (int s = 0; s < 2 && !known.workers.empty(); ++s) {
        const std::lock_guard<std::mutex> lock(ends[s]);
        const int sum = End(servers[s].get(), known);
        if (sum < 0) continue;
        EXPECT_EQ(sum, 3 * 1000 * round + 3);
        ++ended[s];
      }
    }
  });
  EXPECT_EQ(ended[0], kRounds);
  EXPECT_EQ(ended[1], kRounds);
}

// Deadlines, ends of steps, arrivals and the end of the rounds race. Each wait
// is answered once.
TEST(Rounds, EndsThatRace) {
  constexpr int kTimes = 60, kThreads = 4, kWaits = 6;
  for (int i = 0; i < kTimes; ++i) {
    auto rounds = std::make_shared<IntRounds>(
        "r", 2, &DeadlineTimer::Get(), [](const std::string&) {});
    std::atomic<int> answers{0};
    Notification all;
    InThreads(kThreads, [&](int t) {
      Random random(kThreads * i + t);
      std::vector<std::function<void()>> ends;
      for (int w = 0; w < kWaits; ++w) {
        const std::string name = std::to_string(t % 2);
        const bool turn = Below(2, &random) == 0;
        RoundWait wait{turn ? For::kTurn : For::kClose, {-1, 0}, name};
        wait.turn_secs = 1e-5 * Below(30, &random);
        wait.grace_secs = 1e-5 * Below(30, &random);
        wait.timeout_secs = 1e-5 * Below(30, &random);
        if (Below(2, &random) == 0) {
          wait.watch = [&ends](std::function<void()> end) {
            ends.push_back(std::move(end));
            return true;
          };
          wait.unwatch = [] {};
        }
        // The turn may be answered after this thread's step.
        const auto self = rounds;
        wait.done = [&, self, turn, name](const RoundAnswer& answer) {
          Known known;
          if (turn && answer.known.turn >= 0) {
            Stage(self.get(), name, answer.known, 1);
            self->Arrive(name, answer.known, &known);
          }
          if (++answers == kThreads * kWaits) all.Notify();
        };
        rounds->Start(std::move(wait));
        if (w == 3 && t == 1) Next(rounds.get());
        if (w == 4 && t == 2) rounds->End();
        if (!ends.empty()) ends[Below(ends.size(), &random)]();
      }
    });
    all.Wait();
    EXPECT_EQ(answers, kThreads * kWaits);
  }
}

// A part of another place, turn, weight or count begins anew.
TEST(Arrivals, AddDropsWhatBelongsElsewhere) {
  struct Sent {
    Place place;
    int64_t turn;
    double weight;
    size_t count;
  };
  for (const Sent& sent : {Sent{{2, 1}, 2, 3, 2}, Sent{{1, 2}, 2, 3, 2},
                           Sent{{1, 1}, 4, 3, 2}, Sent{{1, 1}, 2, 5, 2},
                           Sent{{1, 1}, 2, 3, 3}}) {
    Arrivals<int> arrivals;
    std::vector<std::vector<int>> dropped;
    arrivals.Add("a", {1, 1}, 2, 3, 2, 0, {7}, &dropped);
    dropped.clear();
    arrivals.Add("a", sent.place, sent.turn, sent.weight, sent.count, 1, {8},
                 &dropped);
    EXPECT_EQ(dropped, (std::vector<std::vector<int>>{{7, 0}}));
    EXPECT_FALSE(arrivals.Find("a")->is_complete());
  }
}

}  // namespace
}  // namespace wrapopt
