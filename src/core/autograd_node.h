#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

// References to nodes of autograd's graph. LibTorch 2.11 holds nodes by shared_ptr, 2.15 by
// intrusive_ptr.
namespace semitone {

using NodePtr = decltype(torch::autograd::Edge::function);

inline constexpr bool kSharesNodes =
    std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

using WeakNodePtr = std::conditional_t<kSharesNodes, std::weak_ptr<torch::autograd::Node>,
                                       c10::weak_intrusive_ptr<torch::autograd::Node>>;

template <typename T>
using NodePtrOf = std::conditional_t<kSharesNodes, std::shared_ptr<T>, c10::intrusive_ptr<T>>;

// A reference to a new node. Its end frees the nodes behind it without recursion, however long the
// graph is.
template <typename T, typename... Arguments>
NodePtrOf<T> make_node(Arguments&&... arguments) {
  if constexpr (kSharesNodes) {
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...),
                              [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace semitone
