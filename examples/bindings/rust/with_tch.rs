//! A model of tch, trained in fp16 with dynamic loss scaling.
//!
//! UNTESTED: the crate tch was not available where Semitone is built, so this program has not been
//! compiled. tch must use the LibTorch that Semitone was built with (its variable LIBTORCH).

#[allow(dead_code)]
mod semitone;

use semitone::{Policy, Scaler, TensorPtr, FLOAT16};
use tch::nn::{Module, OptimizerConfig};
use tch::{nn, Device, Kind, Tensor};

fn pointer(tensor: &Tensor) -> TensorPtr {
    tensor.as_ptr() as TensorPtr
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vars = nn::VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(vars.root() / "first", 784, 128, Default::default()))
        .add_fn(|x| x.relu())
        .add(nn::linear(vars.root() / "second", 128, 10, Default::default()));
    let mut optimizer = nn::Sgd::default().build(&vars, 0.1)?;
    // Copies of a tch::Tensor that refer to the same C++ tensor.
    let parameters: Vec<Tensor> = vars.trainable_variables();
    let pointers: Vec<TensorPtr> = parameters.iter().map(pointer).collect();

    let policy = Policy::new("semitone", "cpu", FLOAT16)?;
    let mut scaler = Scaler::new("torch", &[])?;
    let images = Tensor::rand([64, 784], (Kind::Float, Device::Cpu));
    let labels = Tensor::randint(10, [64], (Kind::Int64, Device::Cpu));
    for _ in 0..10 {
        optimizer.zero_grad();
        let loss = {
            let _region = policy.enter()?;
            net.forward(&images).cross_entropy_for_logits(&labels)
        };
        // The result is a new at::Tensor, which tch deletes.
        let scaled = unsafe { Tensor::from_ptr(scaler.scale(pointer(&loss))? as *mut _) };
        scaled.backward();
        if !unsafe { scaler.unscale(&pointers)? } {
            optimizer.step();
        }
        scaler.update()?;
        println!("loss {:.4}, scale {}", loss.double_value(&[]), scaler.get_scale()?);
    }
    Ok(())
}
