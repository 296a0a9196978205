#include "semitone/scaling/master_weights.h"

#include "semitone/core/error.h"
#include "src/core/unreduced.h"
#include "src/scaling/masters.h"

#include <memory>

namespace semitone::amp {

MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact)
    : masters_(std::make_unique<Masters>(optimizer, exact)) {}
MasterWeights::MasterWeights(MasterWeights&&) noexcept = default;
MasterWeights::~MasterWeights() = default;

std::size_t MasterWeights::size() const {
  return masters_->size();
}

bool MasterWeights::take_gradients(float inverse_scale) {
  masters_->follow_groups();
  // Moved to a master, they would be left out of the average that the next backward pass takes.
  masters_->for_each([](const at::Tensor& parameter, const at::Tensor& /*master*/) {
    if (!is_unreduced(parameter.grad())) return;
    throw Error(
        "amp.master_weights.take_gradients", "gradients that are averaged over the ranks",
        "this rank's own, of a backward pass in no_sync",
        "call take_gradients() once, after the backward pass outside of no_sync, or average "
        "the gradients with comm::Group::all_reduce first");
  });
  return masters_->take_gradients(inverse_scale);
}

void MasterWeights::for_each(
    const std::function<void(const at::Tensor& parameter, const at::Tensor& master)>& visit) const {
  masters_->for_each(visit);
}

void MasterWeights::write_model() {
  masters_->write_model();
}

void MasterWeights::sync() {
  masters_->sync();
}

void MasterWeights::pull() {
  masters_->pull();
}

void MasterWeights::step() {
  masters_->step();
}

void MasterWeights::clear_gradients() {
  masters_->clear_gradients();
}

bool MasterWeights::is_master(const at::Tensor& tensor) const {
  return masters_->is_master(tensor);
}

bool MasterWeights::has(const at::Tensor& parameter) const {
  return masters_->has(parameter);
}

at::Tensor MasterWeights::master_of(const at::Tensor& parameter) const {
  return masters_->master_of(parameter);
}

void MasterWeights::set(const at::Tensor& parameter, const at::Tensor& value) {
  masters_->set(parameter, value);
}

void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  masters_->save(archive);
}

void MasterWeights::load(torch::serialize::InputArchive& archive) {
  masters_->load(archive);
}

}  // namespace semitone::amp
