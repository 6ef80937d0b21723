//! The program `ebbtide`.

use std::process::ExitCode;

/// Requests allocate on one thread and free on another, which is what the system's allocator is slow at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ebbtide::cli::main()
}
