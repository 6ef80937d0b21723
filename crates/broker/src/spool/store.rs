//! The spool's folder: append-only files, how far they are replayed, and what was refused.
//!
//! ```text
//! lock                       held by the server whose spool it is
//! 000000000001.spool …       records, in order; a file goes when all of it is replayed
//! position                   file and byte up to which everything is replayed
//! failed.jsonl               messages that the database refuses for good, one a line, with the reason
//! damaged-…                  bytes of a file that were no records
//! ```

use std::collections::VecDeque;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use tracing::{error, warn};

use super::record::{self, HEADER, PREFIX_BYTES, Record};
use super::{Place, Settings};

const LOCK: &str = "lock";
const POSITION: &str = "position";
const FAILED: &str = "failed.jsonl";
/// A file is begun anew at this size, or at an eighth of the spool's bound.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Bytes read at once for a replay; a record alone may be larger.
const READ_BYTES_MAX: u64 = 4 << 20;

/// One file of records.
#[derive(Debug)]
struct Segment {
    number: u64,
    bytes: u64,
    messages: usize,
}

/// What a new server finds in its folder.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Queue and messages of each record that is to be replayed.
    pub(super) records: Vec<(String, usize)>,
    /// Messages refused for good, of earlier.
    pub(super) failed: usize,
}

/// A record, and where the next one begins.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) record: Record,
    pub(super) end: Place,
}

/// The folder, held by this process alone.
#[derive(Debug)]
pub(super) struct Store {
    folder: PathBuf,
    bytes_max: u64,
    messages_per_file: usize,
    files: VecDeque<Segment>,
    /// The last of `files`, open for more; `None` before the first append and after a failed one.
    tail: Option<File>,
    next_number: u64,
    position: Place,
    failed_bytes: u64,
    _lock: File,
}

impl Store {
    /// Makes and locks the folder, and finds what is in it.
    ///
    /// # Errors
    /// If the folder cannot be made, read or written, or another server holds it.
    pub(super) fn open(settings: &Settings) -> io::Result<(Self, Found)> {
        DirBuilder::new().recursive(true).mode(0o700).create(&settings.folder)?;
        let lock = private(&settings.folder.join(LOCK)).create(true).write(true).truncate(false).open_it()?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another server uses it"));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut store = Self {
            folder: settings.folder.clone(),
            bytes_max: settings.bytes_max,
            messages_per_file: settings.messages_per_file,
            files: VecDeque::new(),
            tail: None,
            next_number: 1,
            position: Place::default(),
            failed_bytes: 0,
            _lock: lock,
        };
        let found = store.recover()?;
        Ok((store, found))
    }

    /// Bytes on disk, replayed parts of the files and refused messages included.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum::<u64>() + self.failed_bytes
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{number:012}.spool"))
    }

    fn recover(&mut self) -> io::Result<Found> {
        let mut found = Found::default();
        if let Ok(text) = std::fs::read_to_string(self.folder.join(FAILED)) {
            self.failed_bytes = text.len() as u64;
            found.failed = text.lines().count();
        }
        self.position = self.read_position();
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.strip_suffix(".spool")?.parse::<u64>().ok());
            numbers.extend(number);
        }
        numbers.sort_unstable();
        for number in numbers {
            self.next_number = number + 1;
            if number < self.position.file {
                std::fs::remove_file(self.path(number))?;
                continue;
            }
            let file = self.recover_file(number, &mut found)?;
            self.files.push_back(file);
        }
        self.next_number = self.next_number.max(self.position.file + 1);
        if let Some(first) = self.files.front()
            && self.position.file < first.number
        {
            self.position = Place { file: first.number, byte: HEADER.len() as u64 };
        }
        Ok(found)
    }

    /// Reads a file's records. What is none is set aside, and the file ends before it if nothing whole follows.
    fn recover_file(&self, number: u64, found: &mut Found) -> io::Result<Segment> {
        let path = self.path(number);
        let bytes = std::fs::read(&path)?;
        let mut file = Segment { number, bytes: bytes.len() as u64, messages: 0 };
        let from = if number == self.position.file { self.position.byte } else { 0 };
        let mut at = if bytes.starts_with(HEADER) { HEADER.len() } else { bytes.len().min(HEADER.len()) };
        while at < bytes.len() {
            let Some(body) = record::body(&bytes[at..]) else {
                let next = next_record(&bytes, at);
                self.set_aside(number, at, &bytes[at..next.unwrap_or(bytes.len())])?;
                let Some(next) = next else { break };
                at = next;
                continue;
            };
            if let Some((queue, messages)) = Record::summary(body) {
                file.messages += messages;
                if from <= at as u64 {
                    found.records.push((queue.to_owned(), messages));
                }
            }
            at += PREFIX_BYTES + body.len();
        }
        if at < bytes.len() {
            let kept = OpenOptions::new().write(true).open(&path)?;
            kept.set_len(at as u64)?;
            kept.sync_all()?;
            file.bytes = at as u64;
        }
        Ok(file)
    }

    /// A server that was killed leaves the start of a record that it promised to nobody. Anything else is damage. The
    /// bytes are kept either way.
    fn set_aside(&self, number: u64, at: usize, bytes: &[u8]) -> io::Result<()> {
        let path = self.folder.join(format!("damaged-{number:012}-{at}"));
        let mut aside = private(&path).create(true).write(true).truncate(true).open_it()?;
        aside.write_all(bytes)?;
        aside.sync_all()?;
        warn!(
            target: "spool", file = number, at, bytes = bytes.len(), kept_in = %path.display(),
            "the spool has bytes that are no whole record: the end of a push that was never answered, unless the disk is damaged"
        );
        Ok(())
    }

    fn read_position(&self) -> Place {
        let path = self.folder.join(POSITION);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Place::default(),
            Err(error) => error.to_string(),
        };
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        let (Some(Ok(file)), Some(Ok(byte)), None) = (numbers.next(), numbers.next(), numbers.next()) else {
            error!(
                target: "spool", path = %path.display(),
                "the spool does not know how far it was replayed: all of it is replayed again, and duplicates are refused by their transaction ids"
            );
            return Place::default();
        };
        Place { file, byte }
    }

    /// Appends whole records and makes them durable, all or none.
    ///
    /// # Errors
    /// If the disk does not take them. Nothing of them is left then.
    pub(super) fn append(&mut self, records: &[u8], messages: usize) -> io::Result<()> {
        self.rotate()?;
        let file = self.files.back_mut().expect("rotate() leaves one");
        let tail = self.tail.as_mut().expect("rotate() leaves one");
        match tail.write_all(records).and_then(|()| tail.sync_data()) {
            Ok(()) => {
                file.bytes += records.len() as u64;
                file.messages += messages;
                Ok(())
            }
            Err(error) => {
                // The file is not appended to again: what a failed sync left of it is not known.
                let shortened = tail.set_len(file.bytes).and_then(|()| tail.sync_all());
                if let Err(error) = shortened {
                    error!(target: "spool", %error, file = file.number, "the spool could not take back a failed write");
                }
                self.tail = None;
                Err(error)
            }
        }
    }

    /// Whether there is room for so many bytes more.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.bytes() + bytes as u64 + HEADER.len() as u64 <= self.bytes_max
    }

    /// Begins a file if there is none, or if the last one is full.
    fn rotate(&mut self) -> io::Result<()> {
        let bytes_max = FILE_BYTES_MAX.min(self.bytes_max / 8);
        let is_full = |file: &Segment| bytes_max <= file.bytes || self.messages_per_file <= file.messages;
        if self.tail.is_some() && !self.files.back().is_none_or(is_full) {
            return Ok(());
        }
        let number = self.next_number;
        let mut file = private(&self.path(number)).create_new(true).append(true).open_it()?;
        self.next_number += 1;
        file.write_all(HEADER)?;
        file.sync_all()?;
        sync_folder(&self.folder)?;
        let bytes = HEADER.len() as u64;
        if self.files.is_empty() {
            self.position = Place { file: number, byte: bytes };
        }
        self.files.push_back(Segment { number, bytes, messages: 0 });
        self.tail = Some(file);
        Ok(())
    }

    /// The next records in order, of at most `messages_max` messages or one record.
    ///
    /// # Errors
    /// If the disk does not give them.
    pub(super) fn next(&self, messages_max: usize) -> io::Result<Vec<Stored>> {
        let mut place = self.position;
        for file in &self.files {
            if file.number < place.file {
                continue;
            }
            if place.file < file.number {
                place = Place { file: file.number, byte: HEADER.len() as u64 };
            }
            let read = self.read(file, place, messages_max)?;
            if !read.is_empty() {
                return Ok(read);
            }
        }
        Ok(Vec::new())
    }

    fn read(&self, file: &Segment, from: Place, messages_max: usize) -> io::Result<Vec<Stored>> {
        let mut at = from.byte.max(HEADER.len() as u64);
        if file.bytes <= at {
            return Ok(Vec::new());
        }
        let mut opened = File::open(self.path(file.number))?;
        let mut read = Vec::new();
        let mut messages = 0;
        let mut bytes = chunk(&mut opened, at, file.bytes, READ_BYTES_MAX)?;
        let mut is_whole_rest = file.bytes - at <= READ_BYTES_MAX;
        while !bytes.is_empty() && messages < messages_max {
            let Some(body) = record::body(&bytes) else {
                if read.is_empty() && !is_whole_rest {
                    bytes = chunk(&mut opened, at, file.bytes, u64::MAX)?;
                    is_whole_rest = true;
                    continue;
                }
                let Some(skipped) = next_record(&bytes, 0).filter(|_| is_whole_rest) else { break };
                (at, bytes) = (at + skipped as u64, bytes.slice(skipped..));
                continue;
            };
            let taken = PREFIX_BYTES + body.len();
            let body = bytes.slice_ref(body);
            (at, bytes) = (at + taken as u64, bytes.slice(taken..));
            match Record::read(&body) {
                Some(record) => {
                    messages += record.group.messages.len();
                    read.push(Stored { record, end: Place { file: file.number, byte: at } });
                }
                None => {
                    error!(target: "spool", file = file.number, at, "a record of the spool is in no format this release knows")
                }
            }
        }
        Ok(read)
    }

    /// Everything up to `place` is replayed; `refused` are lines of what the database does not take.
    ///
    /// # Errors
    /// If the disk does not take it. Then the same is replayed again later.
    pub(super) fn advance(&mut self, place: Place, refused: &[u8]) -> io::Result<()> {
        if !refused.is_empty() {
            let mut failed = private(&self.folder.join(FAILED)).create(true).append(true).open_it()?;
            failed.write_all(refused)?;
            failed.sync_all()?;
            self.failed_bytes += refused.len() as u64;
        }
        self.position = place;
        self.drop_replayed()?;
        let temporary = self.folder.join("position.new");
        let mut file = private(&temporary).create(true).write(true).truncate(true).open_it()?;
        write!(file, "{} {}", self.position.file, self.position.byte)?;
        file.sync_all()?;
        std::fs::rename(&temporary, self.folder.join(POSITION))?;
        sync_folder(&self.folder)
    }

    fn drop_replayed(&mut self) -> io::Result<()> {
        while let Some(first) = self.files.front() {
            let is_done = first.number < self.position.file
                || (first.number == self.position.file && first.bytes <= self.position.byte);
            if !is_done {
                break;
            }
            std::fs::remove_file(self.path(first.number))?;
            self.files.pop_front();
            if self.files.is_empty() {
                self.tail = None;
            }
        }
        Ok(())
    }
}

/// Where the next whole record begins behind the broken one at `at`, if its length is still right.
fn next_record(bytes: &[u8], at: usize) -> Option<usize> {
    let length = u32::from_le_bytes(*bytes.get(at..)?.first_chunk::<4>()?);
    let next = at.checked_add(PREFIX_BYTES)?.checked_add(usize::try_from(length).ok()?)?;
    record::body(bytes.get(next..)?).map(|_| next)
}

fn chunk(file: &mut File, from: u64, end: u64, bytes_max: u64) -> io::Result<Bytes> {
    file.seek(SeekFrom::Start(from))?;
    let length = (end - from).min(bytes_max);
    let mut bytes = Vec::with_capacity(usize::try_from(length).expect("a file of the spool fits into memory"));
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

/// Payloads may be confidential: nobody else reads the files.
struct Private<'a>(OpenOptions, &'a Path);

fn private(path: &Path) -> Private<'_> {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    Private(options, path)
}

impl Private<'_> {
    fn create(mut self, on: bool) -> Self {
        self.0.create(on);
        self
    }

    fn create_new(mut self, on: bool) -> Self {
        self.0.create_new(on);
        self
    }

    fn write(mut self, on: bool) -> Self {
        self.0.write(on);
        self
    }

    fn append(mut self, on: bool) -> Self {
        self.0.append(on);
        self
    }

    fn truncate(mut self, on: bool) -> Self {
        self.0.truncate(on);
        self
    }

    fn open_it(self) -> io::Result<File> {
        self.0.open(self.1)
    }
}

/// A new name is durable when its folder is.
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests;
