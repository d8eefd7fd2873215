//! Requests, and the batch of the next step.

use crate::model::{Model, BLOCK, VOCABULARY};
use crate::pool::{Pool, Slots};
use half::bf16;
use muse_spark_layer::backend::cpu::Batch as HostBatch;
use muse_spark_layer::synthetic::Random;
use muse_spark_layer::PerKind;
use std::collections::VecDeque;

/// At fewer rows the unpooler computes this rank's columns only, and other ranks' are wanted from a gather.
pub const LEAST_ROWS: usize = 9;

/// What a loop is made for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that run at the same time.
    pub running: usize,
    /// Tokens of the longest request: the width of the page tables.
    pub longest: usize,
    /// Prompt tokens of a step.
    pub chunk: usize,
    /// Keys that a sliding layer's token sees.
    pub window: usize,
}

impl Limits {
    pub const CPU: Limits = Limits { running: 0, longest: 0, chunk: 24, window: 24 };
    #[cfg(feature = "cuda")]
    pub const GPU: Limits = Limits { running: 0, longest: 0, chunk: 128, window: 2048 };

    /// Requests of the batches that graphs are captured for.
    pub fn buckets(&self) -> Vec<usize> {
        let last = self.running.max(LEAST_ROWS);
        let mut all: Vec<usize> = [LEAST_ROWS, 12, 16, 24, 32, 48, 64].into_iter().filter(|n| *n < last).collect();
        all.push(last);
        all
    }

    /// The most rows of a step.
    #[cfg(feature = "cuda")]
    pub fn tokens(&self) -> usize {
        (self.chunk + self.running).max(self.running.max(LEAST_ROWS) * BLOCK)
    }

    /// Slots of a pool of full layers and of sliding ones, the sink included.
    pub fn slots(&self) -> PerKind<usize> {
        let of_sliding = self.longest.min(self.window + self.chunk + BLOCK);
        PerKind { full: 1 + self.running * self.longest, sliding: 1 + self.running * of_sliding }
    }
}

/// What a step is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// A chunk of one or more prompts, and a row of each request that decodes: run as it comes.
    Mixed = 0,
    /// A row a request, padded to a bucket: a graph.
    Decode = 1,
    /// [`BLOCK`] rows a request, padded to a bucket: a graph.
    Verify = 2,
}

impl StepKind {
    pub const ALL: [StepKind; 3] = [StepKind::Mixed, StepKind::Decode, StepKind::Verify];

    pub fn name(self) -> &'static str {
        ["mixed", "decode", "verify"][self as usize]
    }
}

/// A step, as arrays that the engines take.
#[derive(Debug)]
pub struct Batch {
    pub kind: StepKind,
    /// `[T]`, rows of padding last.
    pub tokens: Vec<u32>,
    /// Rows that are not padding.
    pub real_tokens: usize,
    pub positions: Vec<i64>,
    pub cu_seqlens_q: Vec<i32>,
    pub cache_seqlens: Vec<i32>,
    pub cache_loc: PerKind<Vec<i64>>,
    /// `[B, width]`.
    pub page_table: PerKind<Vec<i32>>,
    pub width: usize,
    /// The first requests that are chunks of prompts; short ones stand behind them.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // The CPU has one attention for all.
    pub chunks: usize,
    /// Requests with rows, in the rows' order.
    requests: Vec<usize>,
}

impl Batch {
    /// The batch as both kinds of layer see it.
    pub fn views(&self) -> PerKind<HostBatch<'_>> {
        let of = |cache_loc, page_table| HostBatch {
            positions: &self.positions,
            cache_loc,
            cu_seqlens_q: &self.cu_seqlens_q,
            cache_seqlens: &self.cache_seqlens,
            page_table,
            table_width: self.width,
            table_stride: self.width,
        };
        PerKind {
            full: of(&self.cache_loc.full, &self.page_table.full),
            sliding: of(&self.cache_loc.sliding, &self.page_table.sliding),
        }
    }

    pub fn requests(&self) -> usize {
        self.cache_seqlens.len()
    }

    /// Rows up to `rows` that are nothing: any token, stored in the sink.
    fn pad_rows(&mut self, rows: usize) {
        self.tokens.resize(rows, 0);
        self.positions.resize(rows, 0);
        self.cache_loc.full.resize(rows, 0);
        self.cache_loc.sliding.resize(rows, 0);
    }
}

#[derive(Debug, Default)]
struct Request {
    /// Prompt, then what was generated.
    tokens: Vec<u32>,
    prompt: usize,
    /// Tokens whose keys and values are stored: all but the last while it decodes.
    cached: usize,
    slots: PerKind<Slots>,
    /// The last layer's output at the last token that was sampled from.
    hidden: Vec<bf16>,
}

/// Requests by their state, and the pools.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    requests: Vec<Request>,
    waiting: VecDeque<usize>,
    running: Vec<usize>,
    pools: PerKind<Pool>,
    generate: usize,
    pub drafted: usize,
    pub accepted: usize,
}

impl Scheduler {
    /// `requests` prompts of 1 to `prompt` tokens, of which each is to get `generate` more.
    pub fn new(limits: Limits, model: &Model, requests: usize, prompt: usize, generate: usize) -> Scheduler {
        let random = Random::new(1, "prompts");
        let made = (0..requests as u64).map(|r| {
            let length = 1 + random.below(r << 32, prompt.max(1) as u64);
            let tokens = (0..length).map(|i| random.below((r << 32) + 1 + i, u64::from(VOCABULARY)) as u32).collect();
            Request { tokens, prompt: length as usize, ..Request::default() }
        });
        let slots = limits.slots();
        assert_eq!(limits.window, model.config().window);
        Scheduler {
            limits,
            requests: made.collect(),
            waiting: (0..requests).collect(),
            running: Vec::new(),
            pools: PerKind { full: Pool::new(slots.full), sliding: Pool::new(slots.sliding) },
            generate,
            drafted: 0,
            accepted: 0,
        }
    }

    /// Requests that run and that wait.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Tokens generated so far.
    pub fn generated(&self) -> usize {
        self.requests.iter().map(|r| r.tokens.len() - r.prompt).sum()
    }

    /// The most slots that were in use.
    pub fn most_slots(&self) -> PerKind<usize> {
        PerKind { full: self.pools.full.most(), sliding: self.pools.sliding.most() }
    }

    /// Slots in use.
    #[cfg(test)]
    pub fn used_slots(&self) -> usize {
        self.pools.full.used() + self.pools.sliding.used()
    }

    /// Of `n` finished requests: the tokens that were sampled from last, and the output there.
    pub fn samples(&self, n: usize) -> Vec<(&[u32], &[bf16])> {
        let stride = (self.requests.len() / n.max(1)).max(1);
        let sampled = |r: &'_ Request| r.tokens.len() - 1;
        self.requests.iter().step_by(stride).take(n).map(|r| (&r.tokens[..sampled(r)], &r.hidden[..])).collect()
    }

    /// The next step, until every request is done.
    pub fn next_batch(&mut self) -> Option<Batch> {
        // A request is admitted when its whole length fits, so that no step runs out of slots.
        while self.running.len() < self.limits.running && self.pools.full.available() >= self.limits.longest {
            let Some(next) = self.waiting.pop_front() else { break };
            self.running.push(next);
        }
        if self.running.is_empty() {
            return None;
        }
        if self.running.iter().any(|r| self.requests[*r].cached < self.requests[*r].prompt) {
            return Some(self.mixed());
        }
        let drafts: Vec<Option<Vec<u32>>> =
            self.running.iter().map(|r| Model::draft(&self.requests[*r].tokens)).collect();
        let found = drafts.iter().flatten().count();
        let rows = self.running.clone().into_iter().zip(drafts);
        if 4 * found < rows.len() {
            let rows = rows.map(|(r, _)| (r, vec![self.last(r)])).collect();
            return Some(self.batch(StepKind::Decode, rows));
        }
        self.drafted += found * (BLOCK - 1);
        // A request without a draft gets one that is rejected.
        let rows = rows
            .map(|(r, draft)| {
                let draft = draft.unwrap_or_else(|| vec![VOCABULARY; BLOCK - 1]);
                (r, [vec![self.last(r)], draft].concat())
            })
            .collect();
        Some(self.batch(StepKind::Verify, rows))
    }

    fn last(&self, request: usize) -> u32 {
        self.requests[request].tokens[self.requests[request].tokens.len() - 1]
    }

    /// Chunks of prompts up to the limit, and a row of each request that decodes.
    fn mixed(&mut self) -> Batch {
        let mut left = self.limits.chunk;
        let (mut rows, mut decoding) = (Vec::new(), Vec::new());
        for &r in &self.running {
            let request = &self.requests[r];
            let pending = &request.tokens[request.cached..];
            if pending.len() == 1 && request.cached > 0 {
                decoding.push((r, pending.to_vec()));
            } else {
                // A prompt that gets nothing of this step is in it all the same: a request of length zero.
                let taken = pending.len().min(left);
                left -= taken;
                rows.push((r, pending[..taken].to_vec()));
            }
        }
        // Short requests last: their attention takes the kernels made for them.
        let chunks = rows.len();
        rows.append(&mut decoding);
        Batch { chunks, ..self.batch(StepKind::Mixed, rows) }
    }

    /// Rows of tokens by request, which get their slots here; graphs are padded to their bucket.
    fn batch(&mut self, kind: StepKind, rows: Vec<(usize, Vec<u32>)>) -> Batch {
        let width = self.limits.longest;
        let mut batch = Batch {
            kind,
            tokens: Vec::new(),
            real_tokens: 0,
            positions: Vec::new(),
            cu_seqlens_q: vec![0],
            cache_seqlens: Vec::new(),
            cache_loc: PerKind::default(),
            page_table: PerKind::default(),
            width,
            chunks: 0,
            requests: Vec::new(),
        };
        let table = |batch: &mut Batch, of_full: &[i32], of_sliding: &[i32]| {
            for (table, row) in [(&mut batch.page_table.full, of_full), (&mut batch.page_table.sliding, of_sliding)] {
                table.extend(row);
                table.resize(table.len() + width - row.len(), 0);
            }
        };
        for (r, tokens) in rows {
            let request = &mut self.requests[r];
            let length = request.cached + tokens.len();
            request.slots.full.reserve(&mut self.pools.full, length);
            request.slots.sliding.reserve(&mut self.pools.sliding, length);
            for position in request.cached..length {
                batch.positions.push(position as i64);
                batch.cache_loc.full.push(i64::from(request.slots.full.get(position)));
                batch.cache_loc.sliding.push(i64::from(request.slots.sliding.get(position)));
            }
            table(&mut batch, request.slots.full.table(length), request.slots.sliding.table(length));
            batch.tokens.extend(tokens);
            batch.cu_seqlens_q.push(batch.tokens.len() as i32);
            batch.cache_seqlens.push(length as i32);
            batch.requests.push(r);
        }
        batch.real_tokens = batch.tokens.len();
        if kind == StepKind::Mixed {
            // Requests of length zero up to what plans are made for, and rows of nobody.
            while batch.requests() < self.limits.running {
                table(&mut batch, &[], &[]);
                batch.cu_seqlens_q.push(batch.tokens.len() as i32);
                batch.cache_seqlens.push(0);
            }
            batch.pad_rows(batch.tokens.len().max(LEAST_ROWS));
        } else {
            let block = if kind == StepKind::Verify { BLOCK } else { 1 };
            let bucket = self.limits.buckets().into_iter().find(|n| *n >= batch.requests()).unwrap_or(0);
            // Padding: length 1, nothing stored, no page; the device scalar keeps it out of the experts.
            while batch.requests() < bucket {
                batch.pad_rows(batch.tokens.len() + block);
                table(&mut batch, &[-1], &[-1]);
                batch.cu_seqlens_q.push(batch.tokens.len() as i32);
                batch.cache_seqlens.push(1);
            }
        }
        batch
    }

    /// Takes what was chosen after each row of the batch, and the rows' outputs.
    pub fn finish(&mut self, batch: &Batch, chosen: &[(u32, Vec<bf16>)]) {
        for (i, &r) in batch.requests.iter().enumerate() {
            let rows = batch.cu_seqlens_q[i] as usize..batch.cu_seqlens_q[i + 1] as usize;
            let request = &mut self.requests[r];
            if rows.is_empty() {
                continue;
            }
            let known = request.tokens.len() - request.cached;
            // The rows that stand: known tokens, then drafts for as long as they are what the model chose.
            let mut stand = rows.len().min(known);
            while stand < rows.len() && batch.tokens[rows.start + stand] == chosen[rows.start + stand - 1].0 {
                stand += 1;
            }
            self.accepted += stand - rows.len().min(known);
            request.cached += stand;
            // Each of them from the last known token on gives a token.
            let more = self.generate - (request.tokens.len() - request.prompt);
            for (token, hidden) in (known - 1..stand).take(more).map(|i| &chosen[rows.start + i]) {
                request.tokens.push(*token);
                request.hidden.clone_from(hidden);
            }
            // What no later token of a sliding layer sees.
            let dead = (request.cached + 1).saturating_sub(self.limits.window);
            request.slots.sliding.release(&mut self.pools.sliding, dead);
            if request.tokens.len() == request.prompt + self.generate {
                request.slots.full.release_all(&mut self.pools.full);
                request.slots.sliding.release_all(&mut self.pools.sliding);
                self.running.retain(|other| *other != r);
            }
        }
    }
}
