//! A linear model learns y = 3x + 1 in fp16 with dynamic loss scaling. It needs no crate:
//!
//!     rustc --edition 2021 linear.rs -L DIR/lib -l semitone_c -C link-arg=-Wl,-rpath,DIR/lib

#[allow(dead_code)]
mod semitone;

use semitone::{call, no_grad, Policy, Scaler, Tensor, Value, FLOAT16};

fn main() -> semitone::Result<()> {
    let x: Vec<f32> = (0..64).map(|i| i as f32 / 64.0).collect();
    let y: Vec<f32> = x.iter().map(|x| 3.0 * x + 1.0).collect();
    let (input, target) = (Tensor::of(&x, &[64, 1])?, Tensor::of(&y, &[64, 1])?);
    let weight = Tensor::of(&[0.0], &[1, 1])?.require_grad()?;
    let bias = Tensor::of(&[0.0], &[1])?.require_grad()?;
    let parameters = [&weight, &bias];
    let pointers = parameters.map(Tensor::as_ptr);

    let policy = Policy::new("semitone", "cpu", FLOAT16)?.keep_fp32("softmax")?;
    let mut scaler = Scaler::new("torch", &[("init_scale", 65536.0)])?;
    let mut skipped = 0;
    for _ in 0..300 {
        for parameter in parameters {
            parameter.clear_grad()?;
        }
        let loss = {
            let _region = policy.enter()?;
            let output = call("aten::linear", &[Value::Tensor(&input), Value::Tensor(&weight), Value::Tensor(&bias)])?;
            call("aten::mse_loss", &[Value::Tensor(&output), Value::Tensor(&target)])?
        };
        unsafe { Tensor::from_ptr(scaler.scale(loss.as_ptr())?) }.backward()?;
        if unsafe { scaler.unscale(&pointers)? } {
            skipped += 1;
        } else {
            no_grad(|| -> semitone::Result<()> {
                for parameter in parameters {
                    let grad = parameter.grad()?.expect("a gradient");
                    call("aten::add_.Tensor", &[Value::Tensor(parameter), Value::Tensor(&grad), Value::Double(-0.5)])?;
                }
                Ok(())
            })?;
        }
        scaler.update()?;
    }
    let (slope, offset) = (weight.read(1)?[0], bias.read(1)?[0]);
    println!("y = {slope:.2} x + {offset:.2}, {skipped} steps skipped, the scale is {}", scaler.get_scale()?);

    let error = call("aten::no_such_operator", &[]).err().expect("an error");
    assert!(error.to_string().contains("expected an operator of LibTorch"), "{error}");
    assert!((slope - 3.0).abs() < 0.1 && (offset - 1.0).abs() < 0.1 && skipped > 0);
    Ok(())
}
