//! The program `ebbtide`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ebbtide::cli::main()
}
