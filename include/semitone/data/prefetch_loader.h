#pragma once

#include "semitone/data/detail/map_batch.h"
#include "semitone/data/detail/prefetcher.h"
#include "semitone/data/prefetch_options.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

/// How batches reach the training.
namespace semitone::data {

/// Reads batches ahead of the training and copies them to its device, so that the training waits
/// for neither. The batches are those of the loader, in the same order.
///
///     auto loader = torch::data::make_data_loader(set, 64);
///     data::PrefetchLoader batches(
///         *loader, data::PrefetchOptions(torch::kCUDA)
///                      .dtype(torch::kHalf).memory_format(at::MemoryFormat::ChannelsLast));
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       for (auto& batch : batches) train(batch.data, batch.target);  // on the device
///     }
///
/// The loader is a torch::data loader with any number of workers, or any other range of batches
/// whose iterators support `!=`, `++` and `*`, such as a vector. It must outlive this object, and
/// nothing else may read it during a pass, which lasts until its end, the next begin() or the
/// destructor. A batch is anything in which map_tensors finds tensors (core/map_tensors.h), or a
/// torch::data::Example, or a vector of either. The loader must yield new tensors for each batch,
/// as torch::data's do: a batch may still be in use when the next ones are read.
///
/// **On an accelerator** (CUDA, or another device with streams), a batch of the host's memory is
/// copied to pinned memory and from there, without blocking, on a side stream. Pinned (page-locked)
/// memory is needed for that: from pageable memory a copy blocks the host. Tensors of the loader
/// that are already pinned are copied directly. (PyTorch's pin_memory=True has no counterpart in
/// LibTorch's DataLoader.) A cast to a narrower dtype happens on the way to pinned memory, so that
/// fewer bytes are copied; all else happens on the device, on the side stream. The stream that is
/// current in the thread that advances the iterator waits for the batch on the device, and the
/// batch's memory is recorded for it. A program that uses a batch on further streams calls
/// at::Tensor::record_stream itself. The host never waits for the device. The loader's own code
/// also runs with the side stream current. At the start of a pass the side stream waits for the
/// work launched until then, so that the loader may yield tensors of the device.
///
/// **On a CPU** nothing is copied unless the options ask for a cast or a format. A batch is read
/// and cast while the training computes on the one before.
///
/// **Threads.** With background(true), a thread reads the loader, up to depth() batches ahead. It
/// computes on one core (at::get_num_threads() is 1 there), and no autocast region or other state
/// of the calling thread applies in it. The loader's begin() is called by the thread that iterates,
/// so a sampler's shuffle draws the same random numbers as without prefetching. Transforms that
/// draw from LibTorch's default generator in the loader's thread interleave with draws of the
/// model (dropout), so their order differs from run to run, as with a DataLoader with workers. Use
/// background(false) there, or a generator of your own.
///
/// **Exceptions** of the loader or the transform are thrown when the iterator would reach the batch
/// for which they were raised; the batches before it are delivered. The pass is then over, and
/// another one may begin, if the loader can: LibTorch's DataLoader with workers cannot while they
/// have batches of the old pass, and has to be made anew.
template <typename Loader>
class PrefetchLoader {
 public:
  /// The type of the batches: the loader's. A TensorList becomes a vector.
  using Batch = decltype(detail::map_batch(*std::begin(std::declval<Loader&>()),
                                           std::declval<at::Tensor (*)(const at::Tensor&)>()));

  /// @param transform  changes each batch after it was moved: normalises images, for example. On an
  /// accelerator it runs on the side stream, so that its work on the device overlaps with the
  /// training
  ///
  /// Error if the device does not exist, if depth is 0, or if dtype is not floating-point.
  PrefetchLoader(Loader& loader, const PrefetchOptions& options,
                 std::function<Batch(Batch)> transform = {})
      : loader_(loader), transform_(std::move(transform)), prefetcher_(options) {}
  PrefetchLoader(const PrefetchLoader&) = delete;
  PrefetchLoader& operator=(const PrefetchLoader&) = delete;
  /// Waits until the loader has returned the batch that it is reading.
  ~PrefetchLoader() = default;

  /// An input iterator. Its batch may be moved from, and lives until the iterator is advanced.
  class Iterator {
   public:
    using difference_type = std::ptrdiff_t;
    using value_type = Batch;
    using pointer = Batch*;
    using reference = Batch&;
    using iterator_category = std::input_iterator_tag;

    Batch& operator*() const { return *loader_->current_; }
    Batch* operator->() const { return loader_->current_.get(); }
    Iterator& operator++() {
      loader_->advance();
      return *this;
    }
    void operator++(int) { loader_->advance(); }
    bool operator==(std::default_sentinel_t) const { return loader_->current_ == nullptr; }

   private:
    friend class PrefetchLoader;
    explicit Iterator(PrefetchLoader& loader) : loader_(&loader) {}
    PrefetchLoader* loader_;
  };

  /// Begins a pass over the loader, and waits for its first batch. There is one pass at a time: an
  /// earlier one ends, and its iterators are invalid. The batches that were read ahead in it are
  /// lost. (A torch::data loader with workers does not begin a pass before all batches of the one
  /// before were read.)
  Iterator begin() {
    current_.reset();
    prefetcher_.stop();
    prefetcher_.start(fetch());
    advance();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  /// The options; the device has its index.
  const PrefetchOptions& options() const { return prefetcher_.options(); }

 private:
  struct Position {
    decltype(std::begin(std::declval<Loader&>())) next;
    decltype(std::end(std::declval<Loader&>())) end;
    bool is_new = true;
  };

  detail::Prefetcher::Fetch fetch() {
    auto position =
        std::make_shared<Position>(Position{std::begin(loader_), std::end(loader_), true});
    return [this, position = std::move(position)] {
      if (!std::exchange(position->is_new, false)) ++position->next;
      if (!(position->next != position->end)) return detail::Fetched();
      const auto move = [this](const at::Tensor& tensor) { return prefetcher_.move(tensor); };
      auto batch = std::make_shared<Batch>(detail::map_batch(*position->next, move));
      if (transform_) *batch = transform_(std::move(*batch));
      detail::Fetched fetched{batch, {}};
      detail::map_batch(*batch, [&](const at::Tensor& tensor) {
        fetched.tensors.push_back(tensor);
        return tensor;
      });
      return fetched;
    };
  }

  void advance() {
    current_.reset();  // its memory can serve the next one
    current_ = std::static_pointer_cast<Batch>(prefetcher_.next());
  }

  Loader& loader_;
  std::function<Batch(Batch)> transform_;
  std::shared_ptr<Batch> current_;
  detail::Prefetcher prefetcher_;  // last: its thread uses the others
};

}  // namespace semitone::data
