//! Keeps what PostgreSQL prints: bounded files on disk, and the last lines at hand for an error.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The current file and one older one, each at most this long.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// A longer line is cut in pieces.
const LINE_BYTES_MAX: u64 = 16 << 10;
const TAIL_LINES: usize = 12;

/// A log of two files, `name` and `name.1`. Cheap to clone.
#[derive(Clone)]
pub(super) struct RotatingLog(Arc<Mutex<Inner>>);

struct Inner {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    tail: VecDeque<String>,
}

impl RotatingLog {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let file_bytes = file.metadata()?.len();
        let inner = Inner { path: path.to_owned(), file, file_bytes, tail: VecDeque::with_capacity(TAIL_LINES) };
        Ok(Self(Arc::new(Mutex::new(inner))))
    }

    /// Copies `source` until it ends; for a thread of its own.
    pub(super) fn copy(&self, source: impl Read) {
        let mut reader = BufReader::new(source);
        let mut line = Vec::new();
        loop {
            line.clear();
            // A read error means that the writer is gone, as the end does.
            match reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => self.append(&line),
            }
        }
    }

    /// The last lines, for the error of a start that failed.
    pub(super) fn tail(&self) -> String {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Vec::from(inner.tail.clone()).join("\n")
    }

    fn append(&self, line: &[u8]) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.tail.len() == TAIL_LINES {
            inner.tail.pop_front();
        }
        inner.tail.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
        // A full disk must not stop the copying: PostgreSQL would block on its full pipe.
        let _ = inner.write(line);
    }
}

impl Inner {
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if self.file_bytes >= FILE_BYTES_MAX {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            std::fs::rename(&self.path, older)?;
            self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            self.file_bytes = 0;
        }
        self.file.write_all(line)?;
        self.file_bytes += line.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_files_bound_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("postgres.log");
        let log = RotatingLog::open(&path).unwrap();
        let line = format!("{}\n", "x".repeat(1 << 20));
        for _ in 0..20 {
            log.copy(line.as_bytes());
        }
        log.copy(b"last line\n".as_slice());
        let bytes = |name: &str| std::fs::metadata(folder.path().join(name)).unwrap().len();
        let most = FILE_BYTES_MAX + LINE_BYTES_MAX;
        assert!(bytes("postgres.log") <= most && bytes("postgres.log.1") <= most);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        assert!(log.tail().ends_with("\nlast line"));
        assert!(std::fs::read_to_string(path).unwrap().ends_with("last line\n"));
    }
}
