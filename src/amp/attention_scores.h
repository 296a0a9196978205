#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>

// torch::nn::MultiheadAttention with a key_padding_mask in 16 bits.
//
// Its C++ code (torch/nn/functional/activation.h, LibTorch 2.11 to 2.15) views the product of
// queries and keys as [batch, heads, queries, keys] and fills the padded keys under
// AT_DISPATCH_FLOATING_TYPES, which knows float and double only and raises for fp16 and bf16:
// "attn_output_weights.masked_fill" not implemented for 'BFloat16'. It is compiled into LibTorch, and
// nothing tells it from other code but what it does. So a 16-bit product of tensors that lie in
// memory as its queries do is remembered, and if that very tensor is viewed so next, it comes back in
// fp32: the mask and the softmax are computed there, and the product with the values, a row of every
// policy, takes it to 16 bits again. Without a key_padding_mask there is no such view.
namespace semitone::amp::attention_scores {

// Whether the arguments of a bmm may be queries and keys of a MultiheadAttention.
bool may_follow(std::span<const c10::IValue> bmm_arguments);

// Remembers a result of bmm on this thread, until the next.
void remember(const at::Tensor& product);

// Whether viewing a tensor in these sizes is MultiheadAttention's way to the mask. Once for each
// product.
bool are_viewed(const at::Tensor& tensor, c10::SymIntArrayRef sizes);

}  // namespace semitone::amp::attention_scores
