//! Tables in parquet files, where the program is built with them.

#![cfg(feature = "parquet")]
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use armt_lab::tasks::documents::{Document, Documents, Rows};
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

/// A table of texts and numbers in groups of a few rows; where there is no text, there is nothing.
fn write(path: &Path, rows: &[Option<&str>], compression: Compression) {
    let schema = "message schema { OPTIONAL BYTE_ARRAY text (UTF8); REQUIRED INT64 number; }";
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    for (number, rows) in rows.chunks(3).enumerate() {
        let mut group = writer.next_row_group().unwrap();
        let texts: Vec<ByteArray> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        let there: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&there), None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let numbers: Vec<i64> = (0..rows.len()).map(|i| (3 * number + i) as i64).collect();
        column.typed::<Int64Type>().write_batch(&numbers, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// The documents of files, as tokens of single bytes would show them.
fn documents(path: &Path, document: Option<Document>) -> Vec<Vec<i32>> {
    let bpe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/books-bpe");
    let tokenizer = Arc::new(armt::text::Tokenizer::find(&bpe).unwrap().unwrap());
    let found = Documents::open(&[path.display().to_string()], "text", document).unwrap();
    let tokens = |found: armt_lab::tasks::documents::Found| found.tokens(&tokenizer).unwrap().map(Result::unwrap).collect();
    found.of_file(0).unwrap().map(|found| tokens(found.unwrap())).collect()
}

#[test]
fn rows_of_a_parquet_table_are_the_documents_of_the_same_rows_as_jsonl() {
    let dir = tempfile::tempdir().unwrap();
    let texts =
        ["A first text.", "Another one,\nof two lines.", "", "Ein Satz mit Umlauten: \u{e4}\u{f6}\u{fc} \"so\".", "The last."];
    let rows: Vec<Option<&str>> = texts.iter().map(|text| Some(*text)).collect();
    let jsonl: String = texts.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text }))).collect();
    let plain = dir.path().join("rows.jsonl");
    std::fs::write(&plain, jsonl).unwrap();
    let kinds = [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default())];
    for (number, compression) in kinds.into_iter().enumerate() {
        let path = dir.path().join(format!("{number}.parquet"));
        write(&path, &rows, compression);
        for document in [None, Some(Document::Row), Some(Document::File)] {
            let found = documents(&path, document);
            assert_eq!(found, documents(&plain, document), "{compression:?} {document:?}");
            assert_eq!(found.len(), if document == Some(Document::File) { 1 } else { 4 });
        }
        let numbers: Vec<i64> =
            Rows::open(&path).unwrap().map(|row| row.unwrap().object().unwrap()["number"].as_i64().unwrap()).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
    }
}

#[test]
fn what_is_wrong_with_a_table_is_named_with_its_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gap.parquet");
    write(&path, &[Some("A text."), None], Compression::SNAPPY);
    let rows: Vec<_> = Rows::open(&path).unwrap().map(Result::unwrap).collect();
    assert_eq!(rows[0].text("text").unwrap(), "A text.");
    let said = rows[1].text("text").unwrap_err().to_string();
    assert!(said.ends_with("gap.parquet: row 2: expected a text in the field text"), "{said}");
    assert!(rows[0].text("body").unwrap_err().to_string().contains("row 1: expected a text in the field body"));
    let other = dir.path().join("other.parquet");
    std::fs::write(&other, "no table at all").unwrap();
    assert!(Rows::open(&other).err().unwrap().to_string().contains("other.parquet: expected a parquet table"));
    let packed = dir.path().join("rows.parquet.gz").display().to_string();
    std::fs::write(&packed, "").unwrap();
    assert!(Documents::open(&[packed], "text", None).unwrap_err().to_string().contains("not packed as a whole"));
}

/// A table of three groups with texts, repetitions and a gap: small pages, a dictionary, definition levels.
fn good(path: &Path, compression: Compression) -> Vec<u8> {
    let rows = ["A first text.", "Another one,\nof two lines.", "", "A first text.", "The last but one.", "A first text."];
    let mut rows: Vec<Option<&str>> = rows.iter().map(|text| Some(*text)).collect();
    rows.insert(4, None);
    write(path, &rows, compression);
    std::fs::read(path).unwrap()
}

/// Reads a table in both ways that a program does; whether every row of it was read.
fn is_read(path: &Path) -> bool {
    // A damaged count of rows may promise far more than there are.
    let all = Rows::open(path).is_ok_and(|rows| rows.take(1000).all(|row| row.is_ok_and(|row| row.object().is_ok())));
    if let Ok(documents) = Documents::open(&[path.display().to_string()], "text", None).and_then(|found| found.of_file(0)) {
        let _ = documents.take(1000).any(|found| found.is_err());
    }
    all
}

#[test]
fn a_damaged_table_is_refused_or_read_and_nothing_panics() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.parquet");
    let mut random = armt::random::Random::new(1);
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default())] {
        let good = good(&path, compression);
        assert!(is_read(&path), "{compression:?}");
        let (mut refused, cases) = (0, 300);
        for case in 0..cases {
            let mut bytes = good.clone();
            match case % 4 {
                0 => bytes.truncate(random.below(good.len())),
                // One bit, and whole bytes.
                1 => bytes[random.below(good.len())] ^= 1 << random.below(8),
                2 => (0..4).for_each(|_| bytes[random.below(good.len())] = random.below(256) as u8),
                // Some bytes are missing.
                _ => {
                    let at = random.below(good.len());
                    bytes.drain(at..good.len().min(at + 1 + random.below(16)));
                }
            }
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(!is_read(&path));
        }
        // A file that lacks its end or bytes within has no place where its footer says.
        assert!(refused > cases / 4, "{compression:?}: {refused} of {cases}");
    }
}
