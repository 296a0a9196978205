#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>

// torch::nn::MultiheadAttention with a key_padding_mask in 16 bits.
//
// Its C++ code (torch/nn/functional/activation.h, LibTorch 2.11 to 2.15) views the product of
// queries and keys as [batch, heads, queries, keys] and fills the padded keys under
// AT_DISPATCH_FLOATING_TYPES, which supports float and double only and raises for fp16 and bf16:
// "attn_output_weights.masked_fill" not implemented for 'BFloat16'. That code is compiled into
// LibTorch and can be recognised by its operators only. A 16-bit product of tensors with its
// queries' strides is therefore remembered. If the next view of that very tensor has these sizes,
// the product itself becomes fp32 before. The mask and the softmax are then computed in fp32, and the
// product with the values, which has a row in every policy, casts to 16 bits again. Without a
// key_padding_mask there is no such view.
//
// A program's own code may do the same. The view is a view of the product there too, so that what is
// written to one of them is in the other.
namespace semitone::amp::attention_scores {

// Whether the arguments of a bmm may be queries and keys of a MultiheadAttention.
bool may_follow(std::span<const c10::IValue> bmm_arguments);

// Remembers a result of bmm on this thread, until the next one.
void remember(const at::Tensor& product);

// Whether a view of a tensor in these sizes is MultiheadAttention's step before the mask. True once
// per product.
bool are_viewed(const at::Tensor& tensor, c10::SymIntArrayRef sizes);

// Gives such a product its values in fp32 memory. Other tensors that share its memory keep it.
void widen(const at::Tensor& product);

}  // namespace semitone::amp::attention_scores
