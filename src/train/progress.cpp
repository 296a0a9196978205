#include "src/train/progress.h"

#include "src/train/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

constexpr auto kBetweenDraws = std::chrono::milliseconds(100);
constexpr std::size_t kWidestBar = 20;
constexpr std::size_t kNarrowestBar = 5;

// Part of a line. If there is no room for all, parts with a high rank are omitted.
struct Field {
  int rank;
  std::string_view gap;  // before it, unless it begins the line
  std::string text;
};

std::string joined(const std::vector<Field>& fields) {
  std::string line;
  for (const Field& field : fields) line.append(line.empty() ? "" : field.gap).append(field.text);
  return line;
}

// As many whole fields as there is room for, in their order. A truncated number would be another
// number.
std::vector<Field> fitting(const std::vector<Field>& fields, std::size_t columns) {
  std::vector<bool> is_in(fields.size(), false);
  const auto kept = [&] {
    std::vector<Field> result;
    for (std::size_t i = 0; i < fields.size(); ++i) {
      if (is_in[i]) result.push_back(fields[i]);
    }
    return result;
  };
  std::vector<std::size_t> by_rank(fields.size());
  std::iota(by_rank.begin(), by_rank.end(), std::size_t{0});
  std::sort(by_rank.begin(), by_rank.end(), [&](std::size_t one, std::size_t other) {
    return fields[one].rank < fields[other].rank;
  });
  for (const std::size_t i : by_rank) {
    is_in[i] = true;
    is_in[i] = joined(kept()).size() <= columns;
  }
  return kept();
}

std::string bar(std::int64_t done, std::int64_t all, std::size_t width) {
  const auto filled = static_cast<std::size_t>(static_cast<std::int64_t>(width) * done / all);
  std::string text(width, ' ');
  std::fill_n(text.begin(), filled, '=');
  if (filled < text.size()) text[filled] = '>';
  return "[" + text + "]";
}

std::string minutes(double seconds) {
  const auto whole = std::llround(seconds);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

// The last column stays free: some terminals start a new line when it is filled.
std::size_t room_in(int columns) {
  return columns > 0 ? static_cast<std::size_t>(columns - 1) : std::string::npos;
}

std::string moving_line(const std::string& label, const StepDone& step, const DataKind& data,
                        std::size_t room) {
  std::vector<Field> fields =
      fitting({{4, "", label},
               {3, "  ", fmt::format("epoch {}/{}", step.epoch, step.epochs)},
               {1, " ", fmt::format("{}/{}", step.batch, step.batches)},
               {2, "  ", fmt::format("loss {:.4f}", without_sign_of_nan(step.loss))},
               {6, "  ", fmt::format("scale {:g}", step.loss_scale)},
               {5, "  ", fmt::format("{:.0f} {}/s", step.items_per_second, data.items)},
               {0, "  ", fmt::format("{} left", minutes(step.seconds_left))}},
              room);
  // The bar gets the remaining width.
  const std::size_t used = joined(fields).size() + std::string_view(" []").size();
  if (used + kNarrowestBar <= room) {
    const auto count = std::find_if(fields.begin(), fields.end(),
                                    [](const Field& field) { return field.rank == 1; });
    fields.insert(count,
                  {7, " ", bar(step.batch, step.batches, std::min(kWidestBar, room - used))});
  }
  return joined(fields);
}

}  // namespace

Progress::Progress(std::ostream& out, std::string label, int columns, std::int64_t every)
    : out_(out), label_(std::move(label)), columns_(columns), every_(every) {}

Progress::~Progress() {
  clear();
}

void Progress::clear() {
  if (!drawn_) return;
  out_ << "\r\033[K" << std::flush;
  drawn_ = false;
}

void Progress::on(const Resumed& resumed) {
  clear();
  out_ << fmt::format("{}  resumed from step {}, '{}'\n", label_, resumed.step,
                      resumed.path.string())
       << std::flush;
}

void Progress::on(const TrainingBegins& begin) {
  kind_ = begin.kind;
}

void Progress::on(const StepDone& step) {
  columns_ > 0 ? draw(step) : say(step);
}

void Progress::draw(const StepDone& step) {
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < kBetweenDraws) return;
  last_ = now;
  out_ << '\r' << moving_line(label_, step, kind_, room_in(columns_)) << "\033[K" << std::flush;
  drawn_ = true;
}

void Progress::say(const StepDone& step) {
  // An epoch's last step has its own line.
  if (every_ <= 0 || step.batch % every_ != 0 || step.batch == step.batches) return;
  out_ << fmt::format(
              "{}  epoch {}/{}  step {}/{}  loss {:.4f}  scale {:g}  {:.0f} {}/s  {} left\n",
              label_, step.epoch, step.epochs, step.batch, step.batches,
              without_sign_of_nan(step.loss), step.loss_scale, step.items_per_second, kind_.items,
              minutes(step.seconds_left))
       << std::flush;
}

void Progress::on(const NonFiniteStep& step) {
  clear();
  out_ << fmt::format("{}  skipped step {}: {}\n", label_, step.step, step.found) << std::flush;
}

void Progress::on(const LossSpike& spike) {
  clear();
  std::string what = "loss spike in step";
  std::string after;
  if (spike.action == OnSpike::skip) what = "left out the batch of step";
  if (spike.action == OnSpike::lower_scale) after = fmt::format("; scale {:g}", spike.loss_scale);
  out_ << fmt::format("{}  {} {}: loss {:.4f}, running mean {:.4f}{}\n", label_, what, spike.step,
                      without_sign_of_nan(spike.loss), without_sign_of_nan(spike.mean_loss), after)
       << std::flush;
}

void Progress::on(const RolledBack& rolled_back) {
  clear();
  out_ << fmt::format("{}  rolled back from step {} to the checkpoint of step {}: {}\n", label_,
                      rolled_back.step, rolled_back.saved, rolled_back.reason)
       << std::flush;
}

void Progress::on(const EpochDone& epoch) {
  clear();
  const std::vector<Field> fields{
      {2, "", label_},
      {0, "  ", fmt::format("epoch {}/{}", epoch.epoch, epoch.epochs)},
      {1, "  ", fmt::format("loss {:.4f}", without_sign_of_nan(epoch.train_loss))},
      {5, "  ", fmt::format("scale {:g} ({} skipped)", epoch.loss_scale, epoch.skipped_steps)},
      {4, "  ", fmt::format("{:.0f} {}/s", epoch.items_per_second, kind_.items)},
      {3, "  ", fmt::format("{:.1f} s", epoch.seconds)}};
  out_ << joined(fitting(fields, room_in(columns_))) << '\n' << std::flush;
}

void Progress::on(const Tested& tested) {
  clear();
  const std::vector<Field> fields{
      {1, "", label_},
      {0, "  ",
       kind_.has_perplexity
           ? fmt::format("test perplexity {:.3f}", without_sign_of_nan(std::exp(tested.loss)))
           : fmt::format("test accuracy {:.2f} %", 100 * tested.accuracy)},
      {2, "  ", fmt::format("loss {:.4f}", without_sign_of_nan(tested.loss))}};
  out_ << joined(fitting(fields, room_in(columns_))) << '\n' << std::flush;
}

}  // namespace semitone::train
