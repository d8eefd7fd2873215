//! Slots of a cache whose pages hold one token, and a request's table of them.

/// Free slots of a pool. Slot 0 is nobody's: padding rows of graphs point there.
#[derive(Debug)]
pub struct Pool {
    free: Vec<i32>,
    slots: usize,
    most: usize,
}

impl Pool {
    pub fn new(slots: usize) -> Pool {
        Pool { free: (1..slots as i32).rev().collect(), slots, most: 0 }
    }

    /// Slots that requests hold.
    pub fn used(&self) -> usize {
        self.slots - 1 - self.free.len()
    }

    /// The most that were held at once.
    pub fn most(&self) -> usize {
        self.most
    }

    pub fn available(&self) -> usize {
        self.free.len()
    }
}

/// The slot of each position of a request; 0 for those that were given back.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    of_position: Vec<i32>,
    /// Positions before this one have given their slot back.
    released: usize,
}

impl Slots {
    /// Makes sure that the first `positions` have a slot. Positions of rejected drafts keep theirs, for the tokens
    /// that come instead.
    pub fn reserve(&mut self, pool: &mut Pool, positions: usize) {
        while self.of_position.len() < positions {
            self.of_position.push(pool.free.pop().expect("requests are admitted only with their slots available"));
        }
        pool.most = pool.most.max(pool.used());
    }

    /// Gives back the slots of positions before `position`.
    pub fn release(&mut self, pool: &mut Pool, position: usize) {
        for slot in &mut self.of_position[self.released.min(position)..position] {
            pool.free.push(std::mem::take(slot));
        }
        self.released = self.released.max(position);
    }

    /// Gives back everything.
    pub fn release_all(&mut self, pool: &mut Pool) {
        self.release(pool, self.of_position.len());
    }

    pub fn get(&self, position: usize) -> i32 {
        self.of_position[position]
    }

    /// The page table's row: stale entries included, which attention never reads.
    pub fn table(&self, positions: usize) -> &[i32] {
        &self.of_position[..positions]
    }
}
