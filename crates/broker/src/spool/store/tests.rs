//! The store over restarts, kills and damage.

use std::fs;
use std::time::Duration;

use bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::bundle::{Group, Message};
use crate::id::PartitionName;
use crate::seal::Sealer;

const ALL: usize = usize::MAX;

fn settings(folder: &TempDir) -> Settings {
    Settings {
        folder: folder.path().join("deep/buffers"),
        make_at_once: true,
        bytes_max: 1 << 20,
        messages_per_file: 3,
        batch_messages: 100,
        pause_first: Duration::from_millis(1),
    }
}

fn open(folder: &TempDir) -> (Store, Found) {
    Store::open(&settings(folder)).expect("opens")
}

/// A record of one message whose transaction id is `id`.
fn written(id: &str) -> Vec<u8> {
    let message = Message {
        id: None,
        transaction_id: Some(id.to_owned()),
        trace_id: None,
        producer: None,
        payload: Bytes::from_static(b"1"),
    };
    let mut bytes = Vec::new();
    let mut group = Group { name: PartitionName::new("q", "p"), messages: vec![message] };
    record::put(&mut bytes, &mut group, &Sealer::default());
    bytes
}

fn append(store: &mut Store, ids: &[&str]) {
    for id in ids {
        store.append(&written(id), 1).expect("written");
    }
}

fn ids(stored: &[Stored]) -> Vec<String> {
    stored.iter().map(|stored| stored.record.group.messages[0].transaction_id.clone().expect("given")).collect()
}

/// Every id that is still to be replayed, taken one after the other.
fn drain(store: &mut Store) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..1000 {
        let stored = store.next(1).expect("read");
        let Some(last) = stored.last() else { return all };
        all.extend(ids(&stored));
        store.advance(last.end, b"").expect("advanced");
    }
    panic!("it does not end: {all:?}");
}

fn files(store: &Store) -> usize {
    let is_file = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|found| found == "spool");
    fs::read_dir(&store.folder).expect("there").filter(|entry| is_file(entry.as_ref().expect("an entry"))).count()
}

#[test]
fn records_come_back_in_order_over_files_and_restarts() {
    let folder = TempDir::new().expect("a folder");
    let (mut store, _) = open(&folder);
    append(&mut store, &["a", "b", "c", "d"]);
    assert_eq!(files(&store), 2, "three messages a file");
    let first = store.next(2).expect("read");
    assert_eq!(ids(&first), ["a", "b"]);
    assert_eq!(ids(&store.next(2).expect("read")), ["a", "b"], "reading moves nothing");
    store.advance(first[1].end, b"").expect("advanced");
    drop(store);

    let (mut store, found) = open(&folder);
    assert_eq!(found.records, [("q".to_owned(), 1), ("q".to_owned(), 1)]);
    append(&mut store, &["e"]);
    assert_eq!(drain(&mut store), ["c", "d", "e"]);
    assert_eq!((files(&store), store.bytes()), (0, 0), "what is replayed is gone");
    append(&mut store, &["f"]);
    drop(store);
    let (mut store, found) = open(&folder);
    assert_eq!(found.records.len(), 1);
    assert_eq!(drain(&mut store), ["f"]);
}

#[test]
fn a_record_cut_off_anywhere_is_dropped_and_kept_aside() {
    let whole = written("b");
    for length in 1..whole.len() {
        let folder = TempDir::new().expect("a folder");
        let (mut store, _) = open(&folder);
        append(&mut store, &["a"]);
        let path = store.path(1);
        drop(store);
        let mut file = OpenOptions::new().append(true).open(&path).expect("there");
        file.write_all(&whole[..length]).expect("written");
        let (mut store, found) = open(&folder);
        assert_eq!(found.records.len(), 1, "cut at {length}");
        append(&mut store, &["c"]);
        assert_eq!(drain(&mut store), ["a", "c"], "cut at {length}");
        let at = HEADER.len() + written("a").len();
        let aside = store.folder.join(format!("damaged-{:012}-{at}", 1));
        assert_eq!(fs::read(aside).expect("kept"), &whole[..length]);
    }
}

#[test]
fn an_altered_record_costs_no_other() {
    let folder = TempDir::new().expect("a folder");
    let (mut store, _) = open(&folder);
    append(&mut store, &["a", "b", "c"]);
    let path = store.path(1);
    drop(store);
    let mut bytes = fs::read(&path).expect("there");
    let second = HEADER.len() + written("a").len();
    bytes[second + PREFIX_BYTES + 4] ^= 1;
    fs::write(&path, &bytes).expect("written");
    let (mut store, found) = open(&folder);
    assert_eq!(found.records.len(), 2);
    assert_eq!(drain(&mut store), ["a", "c"]);
    assert!(store.folder.join(format!("damaged-{:012}-{second}", 1)).exists());
}

#[test]
fn an_unreadable_position_replays_everything() {
    let folder = TempDir::new().expect("a folder");
    let (mut store, _) = open(&folder);
    append(&mut store, &["a", "b"]);
    let stored = store.next(1).expect("read");
    store.advance(stored[0].end, b"").expect("advanced");
    let position = store.folder.join(POSITION);
    drop(store);
    fs::write(&position, "1 x").expect("written");
    assert_eq!(drain(&mut open(&folder).0), ["a", "b"]);
}

#[test]
fn the_bound_counts_what_is_on_disk() {
    let folder = TempDir::new().expect("a folder");
    let (mut store, _) = Store::open(&Settings { bytes_max: 400, ..settings(&folder) }).expect("opens");
    let mut appended = 0;
    while store.has_room(written("a").len()) {
        append(&mut store, &["a"]);
        appended += 1;
        assert!(store.bytes() <= 400 + HEADER.len() as u64);
    }
    assert!((2..10).contains(&appended), "{appended}");
    let stored = store.next(ALL).expect("read");
    store.advance(stored.last().expect("some").end, b"").expect("advanced");
    assert!(store.has_room(written("a").len()));
}

#[test]
fn refused_lines_are_counted_after_a_restart() {
    let folder = TempDir::new().expect("a folder");
    let (mut store, _) = open(&folder);
    append(&mut store, &["a"]);
    let stored = store.next(1).expect("read");
    store.advance(stored[0].end, b"{}\n{}\n").expect("advanced");
    assert_eq!(store.bytes(), 6);
    drop(store);
    let (store, found) = open(&folder);
    assert_eq!((found.failed, found.records.len(), store.bytes()), (2, 0, 6));
}

#[test]
fn one_server_holds_a_folder() {
    let folder = TempDir::new().expect("a folder");
    let _held = open(&folder);
    assert!(Store::open(&settings(&folder)).expect_err("held").to_string().contains("another server"));
}
