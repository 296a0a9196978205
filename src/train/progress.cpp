#include "semitone/train/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <ostream>
#include <utility>

namespace semitone::train {
namespace {

constexpr auto kBetweenDraws = std::chrono::milliseconds(100);
constexpr std::int64_t kBarWidth = 20;

std::string bar(std::int64_t done, std::int64_t all) {
  const auto filled = static_cast<std::size_t>(kBarWidth * done / all);
  std::string text(static_cast<std::size_t>(kBarWidth), ' ');
  std::fill_n(text.begin(), filled, '=');
  if (filled < text.size()) text[filled] = '>';
  return text;
}

std::string minutes(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(std::ostream& out, std::string label, int columns)
    : out_(out), label_(std::move(label)), columns_(columns) {}

Progress::~Progress() {
  clear();
}

void Progress::clear() {
  if (!drawn_) return;
  out_ << "\r\033[K" << std::flush;
  drawn_ = false;
}

void Progress::on(const StepDone& step) {
  if (columns_ <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < kBetweenDraws) return;
  last_ = now;
  std::string line = fmt::format(
      "{}  epoch {}/{} [{}] {}/{}  loss {:.4f}  scale {:g}  {:.0f} images/s  {} left", label_,
      step.epoch, step.epochs, bar(step.batch, step.batches), step.batch, step.batches, step.loss,
      step.loss_scale, step.images_per_second, minutes(step.seconds_left));
  // The last column stays free: some terminals begin a new line when it is filled.
  line.resize(std::min(line.size(), static_cast<std::size_t>(columns_ - 1)));
  out_ << '\r' << line << "\033[K" << std::flush;
  drawn_ = true;
}

void Progress::on(const EpochDone& epoch) {
  clear();
  out_ << fmt::format(
              "{}  epoch {}/{}  loss {:.4f}  scale {:g} ({} skipped)  {:.0f} images/s  {:.1f} s\n",
              label_, epoch.epoch, epoch.epochs, epoch.train_loss, epoch.loss_scale,
              epoch.skipped_steps, epoch.images_per_second, epoch.seconds)
       << std::flush;
}

void Progress::on(const Tested& tested) {
  clear();
  out_ << fmt::format("{}  test accuracy {:.2f} %  loss {:.4f}\n", label_, 100 * tested.accuracy,
                      tested.loss)
       << std::flush;
}

}  // namespace semitone::train
